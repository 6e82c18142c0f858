"""The schedule of streamed weights: gathers ahead of their use, kept weights, gradients in flight."""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh.collectives import InFlightCollective, Pending
from tests.models import build
from tests.streamed import ONLY_Z, PLENTY, Pair, Shape, gathered, overlap, train

# -- gathers ------------------------------------------------------------------------------------------------------------

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MATRICES = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
IN_ORDER = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{matrix}.weight" for i in range(2) for matrix in MATRICES),
    "lm_head.weight",
]
# Backward reads neither: the head's gradient is computed with the loss.
LOOKUP, HEAD = IN_ORDER[0], IN_ORDER[-1]


def watch_uses(pair: Pair, see: Callable[[str], None]) -> Callable[[], None]:
    """Call ``see`` with a weight's name before its module runs, and when the gradient of its output is complete."""

    def before(module: nn.Module, args: Any, name: str) -> None:
        see(name)

    def after(module: nn.Module, args: Any, output: Tensor, name: str) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        if name not in (LOOKUP, HEAD) and not is_recomputed:
            output.register_hook(lambda _: see(name))

    hooks = []
    for weight in IN_ORDER:
        module = pair.model.get_submodule(weight.removesuffix(".weight"))
        hooks.append(module.register_forward_pre_hook(lambda m, a, w=weight: before(m, a, w)))
        hooks.append(module.register_forward_hook(lambda m, a, o, w=weight: after(m, a, o, w)))
    return lambda: [hook.remove() for hook in hooks] and None


def is_large_gather(flight: InFlightCollective) -> bool:
    return flight.kind == "all_gather" and flight.module in IN_ORDER


def watch_gathers(prefetch: int, checkpointing: Any) -> dict[str, Any]:
    """The uses of weights in the third step, in forward and in backward, each with the number of gathers started before."""
    pair = Pair(
        build("llama"),
        Grid.create(ONLY_Z),
        overlap(prefetch=prefetch),
        activation_checkpointing=checkpointing,
    )
    train(pair, 2)
    uses: list[tuple[str, int, int]] = []
    with pair.grid.collectives.recording() as flights:
        watch_uses(pair, lambda name: uses.append((name, sum(map(is_large_gather, flights)), time.time_ns())))
        loss = pair.loss()
        forward = len(uses)
        loss.backward()
    gathers = [flight for flight in flights if is_large_gather(flight)]
    return {"forward": uses[:forward], "backward": uses[forward:], "gathers": gathers}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_gathers_are_ahead_of_use_and_in_its_order(pool: RankPool, prefetch: int, checkpointing: str) -> None:
    for seen in pool.run(watch_gathers, 2, prefetch, checkpointing):
        gathers: list[InFlightCollective] = seen["gathers"]
        names = [flight.module for flight in gathers]
        forward = len(IN_ORDER)
        assert [name for name, _, _ in seen["forward"]] == IN_ORDER
        assert names[:forward] == IN_ORDER
        for i, (_, started, at_ns) in enumerate(seen["forward"]):
            # Those before it and `prefetch` more; at the end of forward, what backward needs first is still gathered.
            if i + prefetch <= forward:
                assert started == i + prefetch
            assert started >= min(i + prefetch, forward)
            (wait,) = gathers[i].waits_ns
            assert at_ns <= wait[0]
            if prefetch and i >= 1:
                assert gathers[i].issued_ns < seen["forward"][i][2]
            if not prefetch:
                assert gathers[i].issued_ns >= at_ns

        # A weight is gathered once for the recomputed forward and backward together.
        uses: dict[str, int] = {}
        for name, started, _ in seen["backward"]:
            uses.setdefault(name, started)
        assert set(uses) == set(IN_ORDER) - {LOOKUP, HEAD}
        kept = len(uses) - (len(names) - forward)
        assert 0 <= kept <= prefetch
        assert names[forward:] == list(uses)[kept:]
        for i, started in enumerate(uses.values()):
            ahead = started - forward + kept
            assert min(i + prefetch, len(uses)) <= ahead <= min(i + 1 + prefetch, len(uses))


# -- memory -------------------------------------------------------------------------------------------------------------

ROW_BYTES = 32 * 4
MLP_BYTES = 64 * ROW_BYTES


def keep(keep_bytes: int, prefetch: int, checkpointing: Any) -> tuple[dict[str, int], Counter[str]]:
    """What is gathered between forward and backward, and how often each weight was gathered, in the third step."""
    pair = Pair(
        build("llama", vocab_size=130),
        Grid.create(ONLY_Z),
        overlap(keep_bytes=keep_bytes, prefetch=prefetch),
        vocabulary=130,
        activation_checkpointing=checkpointing,
    )
    train(pair, 2)
    assert not gathered(pair.model)
    pair.zero_grad()
    with pair.grid.collectives.recording() as flights:
        loss = pair.loss()
        kept = {name: size for name, size in gathered(pair.model).items() if name in IN_ORDER}
        loss.backward()
    assert not gathered(pair.model)
    pair.stock_loss().backward()
    pair.assert_gradients()
    return kept, Counter(flight.module for flight in flights if is_large_gather(flight))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("keep_bytes", "prefetch", "count"),
    [
        (0, 0, 0),
        (MLP_BYTES - 1, 0, 0),
        (MLP_BYTES, 0, 1),
        (3 * MLP_BYTES, 0, 3),
        (3 * MLP_BYTES - 1, 0, 2),
        (3 * MLP_BYTES, 2, 3),
        (PLENTY, 0, len(IN_ORDER) - 1),
        (PLENTY, 4, len(IN_ORDER) - 1),
    ],
)
def test_the_last_weights_of_forward_are_kept_within_the_budget(
    pool: RankPool, keep_bytes: int, prefetch: int, count: int, checkpointing: str
) -> None:
    expected = set(IN_ORDER[len(IN_ORDER) - 1 - count : -1])
    # What a recomputed forward reads first is on its way at the end of forward.
    first = "model.layers.1.self_attn.q_proj.weight"
    ahead = {first} - expected if prefetch and checkpointing == "full" else set()
    for kept, gathers in pool.run(keep, 2, keep_bytes, prefetch, checkpointing):
        assert set(kept) == expected | ahead
        assert sum(size for name, size in kept.items() if name in expected) <= keep_bytes
        once = expected | {LOOKUP, HEAD}
        assert gathers == {name: 1 if name in once else 2 for name in IN_ORDER}


# -- gradients ----------------------------------------------------------------------------------------------------------


def is_large_gradient(flight: InFlightCollective) -> bool:
    return flight.purpose == "gradient" and flight.module in IN_ORDER


def backward_before_the_other() -> tuple[int, int]:
    """Rank 1 starts its backward only when rank 0 is at the end of its own."""
    grid = Grid.create(ONLY_Z)
    pair = Pair(build("llama"), grid, overlap(keep_bytes=PLENTY, in_flight_bytes=PLENTY))
    train(pair, 2)
    rank, word = dist.get_rank(), torch.zeros(1)
    in_flight: list[int] = []
    pair.zero_grad()
    with grid.collectives.recording() as flights:

        def at_the_end(_: Tensor) -> None:
            gradients_sent = [f for f in flights if is_large_gradient(f)]
            in_flight.append(sum(not f.waits_ns for f in gradients_sent))
            if rank == 0:
                dist.send(word, dst=1)

        embedding = pair.model.get_submodule(LOOKUP.removesuffix(".weight"))
        hook = embedding.register_forward_hook(lambda m, a, out: out.register_hook(at_the_end) and None)
        loss = pair.loss()
        if rank == 1:
            dist.recv(word, src=0)
        loss.backward()
        hook.remove()
    pair.stock_loss().backward()
    pair.assert_gradients()
    return in_flight[0], sum(map(is_large_gradient, flights))


def test_backward_continues_while_gradients_are_in_flight(pool: RankPool) -> None:
    in_flight, sent = pool.run(backward_before_the_other, 2)[0]
    assert in_flight == sent - 1 == len(IN_ORDER) - 1


def gradient_flights(shape: Shape, options: dict[str, Any]) -> list[InFlightCollective]:
    """The collectives of a third step's backward."""
    grid = Grid.create(shape)
    pair = Pair(build("llama"), grid, overlap(**options))
    train(pair, 2)
    pair.zero_grad()
    rank = dist.get_rank()
    for layer in pair.model.get_submodule("model.layers").children():
        layer.register_full_backward_hook(
            lambda *_: time.sleep(0.002 * rank)
        )  # ranks run at different speeds
    loss = pair.loss()
    with grid.collectives.recording() as flights:
        loss.backward()
    pair.stock_loss().backward()
    pair.assert_gradients()
    return flights


def is_waited_for_at_once(flights: list[InFlightCollective]) -> list[bool]:
    return [bool(a.waits_ns) and a.waits_ns[0][1] <= b.issued_ns for a, b in itertools.pairwise(flights)]


def test_gradients_without_overlap_are_waited_for_at_once(pool: RankPool) -> None:
    for flights in pool.run(gradient_flights, 4, (2, 2, 1, 1), {"gradients": False}):
        sent = [f for f in flights if f.purpose == "gradient"]
        assert Counter(f.kind for f in sent) == {
            k: len(IN_ORDER) + 1 for k in ("reduce_scatter", "all_reduce")
        }
        assert all(is_waited_for_at_once(sent))


def gradient_flights_on_a_slow_network(options: dict[str, Any]) -> list[InFlightCollective]:
    """No collective is done before it is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "is_done", lambda self: False)
        return gradient_flights(ONLY_Z, options)


@pytest.mark.parametrize("in_flight_bytes", [0, 20_000, None])
def test_gradients_in_flight_stay_below_the_limit(pool: RankPool, in_flight_bytes: int | None) -> None:
    # By default the size of two blocks: q and o, k and v, and the three matrices of the MLP.
    limit = 2 * (2 * 32 + 2 * 16 + 3 * 64) * ROW_BYTES if in_flight_bytes is None else in_flight_bytes
    for flights in pool.run(gradient_flights_on_a_slow_network, 2, {"in_flight_bytes": in_flight_bytes}):
        most = 0
        sent = [f for f in flights if is_large_gradient(f)]
        assert [f.kind for f in sent] == ["reduce_scatter"] * len(IN_ORDER)
        for i, flight in enumerate(sent):
            waiting = [f for f in sent[:i] if f.waits_ns[0][1] > flight.issued_ns]
            total = sum(f.payload_bytes for f in waiting)
            assert total <= limit
            most = max(most, total)
        # The limit is used, up to the largest gradient of a block.
        assert most > limit - MLP_BYTES


def block_of(flight: InFlightCollective) -> str:
    parts = flight.module.split(".")
    return parts[2] if parts[1] == "layers" else "none"


def test_sums_over_data_start_one_block_later_in_the_same_order_on_all_ranks(pool: RankPool) -> None:
    ranks = pool.run(gradient_flights, 4, (2, 2, 1, 1), {})
    orders = [[(f.axis, f.kind, f.purpose, f.module, f.payload_bytes) for f in flights] for flights in ranks]
    assert all(order == orders[0] for order in orders)
    sent = [f for f in ranks[0] if is_large_gradient(f)]
    scattered = [f.module for f in sent if f.axis == "z"]
    assert [f.module for f in sent if f.axis == "data"] == scattered
    assert sorted(scattered) == sorted(IN_ORDER)
    for block, following in (("1", "0"), ("0", "none")):
        of_block = [i for i, f in enumerate(sent) if f.axis == "z" and block_of(f) == block]
        sums = [i for i, f in enumerate(sent) if f.axis == "data" and block_of(f) == block]
        after = [
            i for i, f in enumerate(sent) if f.axis == "z" and block_of(f) == following and i > of_block[-1]
        ]
        # After the first gradient of the next block, and before its second one is sent.
        assert of_block[-1] < sums[0]
        assert len(after) < 2 or sums[-1] < after[1]
