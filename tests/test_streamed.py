"""Streamed weights: the numbers of one process, the storage of FSDP2, and a schedule that keeps ahead of its use."""

import copy
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fourfold as ff
from fourfold import Grid, RankPool, Report
from fourfold.parallel.collectives import Flight, Pending
from fourfold.parallel.weights import local_weight
from tests.models import (
    assert_shards_close,
    batch,
    build,
    gradients,
    local_gradients,
    local_parameters,
    part,
)

Shape = tuple[int, int, int, int]
NOTHING_ELSE_CUT: Shape = (1, 2, 1, 1)
BUNDLE_BYTES = 1024  # of the small models' weights only norms and biases are as small
PLENTY = 10**9


def overlap(**options: Any) -> ff.Overlap:
    return ff.Overlap(**{"bundle_bytes": BUNDLE_BYTES} | options)


class Pair:
    """A model on the grid, and the same in one process."""

    def __init__(
        self,
        stock: nn.Module,
        grid: Grid,
        how: ff.Overlap | None = None,
        vocabulary: int = 131,
        **options: Any,
    ) -> None:
        self.grid, self.vocabulary = grid, vocabulary
        self.stock, self.model = stock, copy.deepcopy(stock)
        self.report: Report = ff.parallelize(
            self.model, grid, weights="streamed", overlap=how or overlap(), **options
        )

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        ids, labels = batch(8, seed=seed)
        return ids % self.vocabulary, torch.where(labels == -100, labels, labels % self.vocabulary)

    def loss(self, seed: int = 2, **options: Any) -> Tensor:
        ids, labels = self.batch(seed)
        rows = self.grid.local_rows(len(ids))
        loss: Tensor = self.model(input_ids=ids[rows], labels=labels[rows], **options).loss
        return loss

    def stock_loss(self, seed: int = 2, **options: Any) -> Tensor:
        ids, labels = self.batch(seed)
        loss: Tensor = self.stock(input_ids=ids, labels=labels, **options).loss
        return loss

    def zero_grad(self) -> None:
        self.stock.zero_grad()
        self.model.zero_grad()

    def assert_exact_step(self, seed: int = 2) -> None:
        self.zero_grad()
        ours, expected = self.loss(seed), self.stock_loss(seed)
        ours.backward()
        expected.backward()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0.0)
        self.assert_gradients()

    def assert_gradients(self) -> None:
        assert_shards_close(local_gradients(self.model), gradients(self.stock), self.report, self.grid)

    def change_weights(self) -> None:
        """What an optimizer does: numbers in place, another factor each time."""
        with torch.no_grad():
            for model in (self.stock, self.model):
                for i, parameter in enumerate(model.parameters()):
                    parameter.mul_(1.1 + 0.1 * (i % 2))


def gathered(model: nn.Module) -> dict[str, int]:
    """Bytes of the blocks whose memory is there: what is measured is memory, and no public name leads to it."""
    flats = {w.name: w._flat for w in model.__dict__["_streamed"]._weights}
    sizes = {name: flat.untyped_storage().size() for name, flat in flats.items() if flat is not None}
    return {name: size for name, size in sizes.items() if size}


# -- storage ------------------------------------------------------------------------------------------------------------


def compare_storage(shape: Shape, kind: str, changes: dict[str, Any]) -> int:
    grid = Grid.create(shape)
    streamed, fsdp2 = build(kind, **changes), build(kind, **changes)
    report = ff.parallelize(streamed, grid, weights="streamed", overlap=overlap())
    expected_report = ff.parallelize(fsdp2, grid, weights="fsdp2")
    assert report.layouts == expected_report.layouts
    expected = dict(fsdp2.named_parameters())
    assert [name for name, _ in streamed.named_parameters()] == list(expected)
    whole = dict(build(kind, **changes).named_parameters())
    uneven = 0
    for name, parameter in streamed.named_parameters():
        assert parameter.shape == expected[name].shape
        assert parameter.placements == expected[name].placements
        assert parameter.device_mesh == expected[name].device_mesh
        assert torch.equal(parameter.to_local(), expected[name].to_local())
        assert torch.equal(parameter.to_local(), part(whole, report, grid, name))
        sizes = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor(parameter.to_local().numel()))
        uneven += len({int(size) for size in sizes}) > 1
    return uneven


@pytest.mark.parametrize(
    ("kind", "shape", "changes"),
    [
        ("llama", (1, 2, 2, 2), {}),
        ("gpt2", (2, 2, 1, 2), {"vocab_size": 11}),
        ("llama", (1, 3, 1, 1), {"hidden_size": 20, "num_attention_heads": 2, "vocab_size": 11}),
        ("llama", (1, 4, 1, 1), {"vocab_size": 5}),  # rows 2, 2, 1 and 0
    ],
)
def test_parameters_are_stored_as_fsdp2_stores_them(
    pool: RankPool, kind: str, shape: Shape, changes: dict[str, Any]
) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    assert min(pool.run(compare_storage, ranks, shape, kind, changes)) > 0


def pass_a_checkpoint_on(folder: str, first: Any, second: Any) -> None:
    grid = Grid.create((1, 2, 1, 2))
    ids, labels = batch(8)
    rows = grid.local_rows(len(ids))
    models = []
    for weights, factor in ((first, 1.0), (second, 3.0)):
        model = build("llama", vocab_size=139)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        ff.parallelize(model, grid, weights=weights, overlap=overlap())
        models.append(model)
    losses = [model(input_ids=ids[rows], labels=labels[rows]).loss.item() for model in models]
    dcp.save({"model": models[0].state_dict()}, checkpoint_id=folder)
    dcp.load({"model": models[1].state_dict()}, checkpoint_id=folder)
    saved = local_parameters(models[0])
    for name, parameter in local_parameters(models[1]).items():
        assert torch.equal(parameter, saved[name])
    loss = models[1](input_ids=ids[rows], labels=labels[rows]).loss.item()
    assert loss == pytest.approx(losses[0], rel=1e-6)
    assert losses[1] != pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(("first", "second"), [("fsdp2", "streamed"), ("streamed", "fsdp2")])
def test_a_checkpoint_of_one_kind_is_read_by_the_other(
    pool: RankPool, tmp_path: Path, first: str, second: str
) -> None:
    pool.run(pass_a_checkpoint_on, 4, str(tmp_path), first, second)


# -- exactness ----------------------------------------------------------------------------------------------------------


def uneven_steps(shape: Shape, kind: str, changes: dict[str, Any], checkpointing: Any) -> None:
    grid = Grid.create(shape)
    for bundle_bytes in (0, BUNDLE_BYTES, PLENTY):
        pair = Pair(
            build(kind, **changes),
            grid,
            overlap(bundle_bytes=bundle_bytes),
            vocabulary=changes["vocab_size"],
            activation_checkpointing=checkpointing,
        )
        for seed in (2, 3, 4):
            pair.assert_exact_step(seed)
            assert not gathered(pair.model)
            pair.change_weights()


@pytest.mark.parametrize(
    ("kind", "shape", "changes", "checkpointing"),
    [
        (
            "llama",
            (1, 4, 1, 1),
            {"hidden_size": 20, "num_attention_heads": 2, "intermediate_size": 22, "vocab_size": 5},
            "none",
        ),
        ("llama", (1, 2, 1, 2), {"vocab_size": 11}, "full"),
        ("gpt2", (2, 2, 1, 1), {"vocab_size": 11}, "full"),
        ("gpt2", (1, 2, 2, 1), {"vocab_size": 11}, "none"),
    ],
)
def test_rows_that_do_not_divide_by_z_are_exact_however_they_travel(
    pool: RankPool, kind: str, shape: Shape, changes: dict[str, Any], checkpointing: str
) -> None:
    pool.run(uneven_steps, 4, shape, kind, changes, checkpointing)


def without_gradients() -> None:
    pair = Pair(build("llama"), Grid.create((1, 2, 1, 2)), overlap(keep_bytes=PLENTY))
    for mode, seed in ((torch.no_grad, 5), (torch.inference_mode, 6)):
        pair.assert_exact_step(seed)
        pair.change_weights()
        with mode():
            torch.testing.assert_close(pair.loss(seed), pair.stock_loss(seed), rtol=1e-5, atol=0.0)
        assert not gathered(pair.model)
        pair.assert_exact_step(seed + 2)


def test_an_evaluation_between_steps_is_exact_and_keeps_nothing(pool: RankPool) -> None:
    pool.run(without_gradients, 4)


def call_parts_alone(options: dict[str, Any]) -> None:
    pair = Pair(build("llama"), Grid.create(NOTHING_ELSE_CUT), overlap(**options))
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    # What the first call may have gathered ahead is what the second reads.
    calls = (("model.layers.0.mlp", "lm_head"), ("model.layers.1.self_attn.o_proj", "model.norm", "lm_head"))
    for seed in (2, 3, 4):
        pair.assert_exact_step(seed)
        for names, mode in itertools.product(calls, (torch.no_grad, torch.enable_grad)):
            pair.change_weights()
            with mode():
                for name in names:
                    ours = pair.model.get_submodule(name)(hidden)
                    expected = pair.stock.get_submodule(name)(hidden)
                    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 4},
        {"prefetch": 0, "keep_bytes": PLENTY},
    ],
)
def test_a_part_called_alone_works_with_the_weights_of_now(pool: RankPool, options: dict[str, Any]) -> None:
    pool.run(call_parts_alone, 2, options)


def backward_through_a_part() -> None:
    pair = Pair(build("llama"), Grid.create(NOTHING_ELSE_CUT))
    hidden = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(0))
    rows = pair.grid.local_rows(len(hidden))
    pair.assert_exact_step(2)
    pair.change_weights()
    pair.zero_grad()
    name = "model.layers.1.mlp"
    pair.model.get_submodule(name)(hidden[rows]).square().sum().backward()
    pair.stock.get_submodule(name)(hidden).square().sum().backward()
    used = 0
    for key, parameter in pair.model.named_parameters():
        expected = pair.stock.get_parameter(key).grad
        assert (parameter.grad is None) == (expected is None), key
        if expected is not None:
            used += 1
            ours = part({key: expected}, pair.report, pair.grid, key)
            torch.testing.assert_close(parameter.grad.to_local(), ours, rtol=1e-4, atol=1e-4)
    assert used == 3
    assert not gathered(pair.model)
    pair.assert_exact_step(3)


def test_a_part_trained_alone_is_exact(pool: RankPool) -> None:
    pool.run(backward_through_a_part, 2)


def inference_mode_first() -> None:
    pair = Pair(build("llama"), Grid.create(NOTHING_ELSE_CUT))
    with torch.inference_mode():
        torch.testing.assert_close(pair.loss(), pair.stock_loss(), rtol=1e-5, atol=0.0)
    pair.assert_exact_step()


def test_inference_mode_may_come_before_training(pool: RankPool) -> None:
    pool.run(inference_mode_first, 2)


def another_graph(pair: Pair, way: str) -> None:
    """A backward that is not the first one after its forward."""
    if way == "two losses":
        losses = [(pair.loss(s), pair.stock_loss(s)) for s in (2, 3)]
        for ours, expected in losses:
            ours.backward()
            expected.backward()
    elif way == "retained":
        ours, expected = pair.loss(), pair.stock_loss()
        for keep in (True, False):
            ours.backward(retain_graph=keep)
            expected.backward(retain_graph=keep)
    else:
        ours, expected = pair.loss(), pair.stock_loss()
        with torch.no_grad():
            pair.loss(3)
        ours.backward()
        expected.backward()


def two_graphs(way: str, bundle_bytes: int) -> None:
    grid = Grid.create(NOTHING_ELSE_CUT)
    pair = Pair(build("llama"), grid, overlap(bundle_bytes=bundle_bytes))
    for _ in range(2):
        pair.zero_grad()
        another_graph(pair, way)
        pair.assert_gradients()
    pair.assert_exact_step()


@pytest.mark.parametrize("way", ["two losses", "retained", "evaluation between"])
@pytest.mark.parametrize(
    "bundle_bytes",
    [0, BUNDLE_BYTES],
)
def test_a_backward_may_come_late(pool: RankPool, way: str, bundle_bytes: int) -> None:
    pool.run(two_graphs, 2, way, bundle_bytes)


def freeze_some() -> None:
    stock = build("llama")
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    for name in names:
        stock.get_parameter(name).requires_grad_(False)
    pair = Pair(stock, Grid.create((2, 2, 1, 1)))
    toggled = (*names[:1], "model.layers.1.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight")
    frozen = [set(names)] * 2 + [set(toggled)] * 2 + [set()] * 2
    for seed, now in enumerate(frozen):
        for model in (pair.stock, pair.model):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in now)
        pair.zero_grad()
        ours, expected = pair.loss(seed), pair.stock_loss(seed)
        ours.backward()
        expected.backward()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0.0)
        assert {n for n, p in pair.model.named_parameters() if p.grad is None} == now
        for model in (pair.stock, pair.model):
            for name in now:  # for the comparison of all others
                parameter = model.get_parameter(name)
                parameter.grad = torch.zeros_like(parameter)
        pair.assert_gradients()
        assert not gathered(pair.model)


def test_a_frozen_weight_gets_no_gradient_and_the_others_theirs(pool: RankPool) -> None:
    pool.run(freeze_some, 4)


class Planted(Exception):
    pass


def fail_in_between(options: dict[str, Any]) -> None:
    pair = Pair(build("llama"), Grid.create((2, 2, 1, 1)), overlap(**options))
    pair.assert_exact_step(1)

    def fail(*_: Any) -> None:
        raise Planted

    for seed, place in enumerate(("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj"), start=2):
        hook = pair.model.get_submodule(place).register_forward_hook(fail)
        with pytest.raises(Planted):
            pair.loss(seed)
        hook.remove()
        pair.assert_exact_step(seed)

        hook = pair.model.get_submodule(place).register_forward_hook(
            lambda m, a, out: out.register_hook(fail) and None
        )
        loss = pair.loss(seed)
        hook.remove()
        with pytest.raises(Planted):
            loss.backward()
        pair.assert_exact_step(seed + 2)
        assert not gathered(pair.model)


@pytest.mark.parametrize("options", [{}, {"keep_bytes": PLENTY}])
def test_a_step_that_fails_leaves_nothing_to_the_next(pool: RankPool, options: dict[str, Any]) -> None:
    pool.run(fail_in_between, 4, options)


def accumulate() -> list[Any]:
    pair = Pair(build("llama"), Grid.create((2, 2, 1, 1)))
    items = sum(int((pair.batch(s)[1][:, 1:] != -100).sum()) for s in (2, 3))
    inside: list[Any] = []
    for inner in (True, False, True):
        pair.zero_grad()
        if inner:
            with ff.accumulating(pair.model), pair.grid.collectives.counting() as entries:
                pair.loss(2, num_items_in_batch=items).backward()
            inside += [e for e in entries if e.purpose == "gradient"]
            assert all(p.grad is None for p in pair.model.parameters())
        else:
            pair.loss(2, num_items_in_batch=items).backward()
        pair.loss(3, num_items_in_batch=items).backward()
        ids, labels = (torch.cat(tensors) for tensors in zip(pair.batch(2), pair.batch(3), strict=True))
        pair.stock(input_ids=ids, labels=labels).loss.backward()
        pair.assert_gradients()
    return inside


def test_micro_batches_make_the_gradient_of_one_batch(pool: RankPool) -> None:
    for inside in pool.run(accumulate, 4):
        assert inside == []


# -- other models -------------------------------------------------------------------------------------------------------

HIDDEN, INNER = 16, 24


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class Wayward(nn.Module):
    """Goes through its blocks in the order that it is told."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        if tied:
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.blocks[2].down.bias = self.blocks[1].down.bias

    def forward(self, hidden: Tensor, order: tuple[int, ...]) -> Tensor:
        hidden = self.norm(hidden)
        for i in order:
            hidden = hidden + self.blocks[i](hidden)
        return hidden


ROLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
WANDERING_PREFETCH = 2


def wander(
    shape: Shape, orders: list[tuple[int, ...]], tied: bool, checkpointing: Any
) -> list[tuple[str, list[str]]]:
    """Compares each step with one process; returns each use of a matrix in the last forward, and the gathers before it."""
    grid = Grid.create(shape)
    torch.manual_seed(0)
    stock = Wayward(tied=tied)
    # Matrices are of 768 bytes at least, biases of 96 at most.
    pair = Pair(
        stock,
        grid,
        overlap(bundle_bytes=128, prefetch=WANDERING_PREFETCH),
        roles=ROLES if grid.x > 1 else None,
        activation_checkpointing=checkpointing,
    )
    rows = grid.local_rows(8)
    uses: list[tuple[str, list[str]]] = []

    def see(name: str) -> None:
        gathers = [f.module for f in flights if f.purpose == "weight" and f.module != "small weights"]
        uses.append((name, gathers))

    for name, module in pair.model.named_modules():
        if name.endswith(("up", "down")):
            module.register_forward_pre_hook(lambda m, a, name=name: see(f"{name}.weight"))
    for step, order in enumerate(orders):
        hidden, upstream = (
            torch.randn(8, 5, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in (step, 99)
        )
        pair.zero_grad()
        uses.clear()
        with grid.collectives.recording() as flights:
            output = pair.model(hidden[rows], order)
        in_forward = list(uses)
        output.backward(upstream[rows])
        expected = stock(hidden, order)
        expected.backward(upstream)
        torch.testing.assert_close(output, expected[rows], rtol=1e-5, atol=1e-5)
        for model in (pair.stock, pair.model):
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        pair.assert_gradients()
        assert not gathered(pair.model)
    return in_forward


@pytest.mark.parametrize(("shape", "checkpointing"), [((1, 2, 1, 2), "none"), ((2, 2, 1, 1), "full")])
def test_a_forward_that_changes_its_way_stays_exact(pool: RankPool, shape: Shape, checkpointing: str) -> None:
    orders: list[tuple[int, ...]] = [
        (0, 1, 2),
        (0, 1, 2),
        (2, 1, 0),
        (0, 2),
        (0, 2),
        (1,),
        (0, 1, 2),
        (0, 0, 1, 2, 1),
        (2, 1, 0),
    ]
    pool.run(wander, 4, shape, orders, False, checkpointing)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 1), (0, 1, 2)),
        ((0, 1, 2), (2, 1, 0)),
    ],
)
def test_a_new_way_is_learnt(pool: RankPool, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    in_order = [f"blocks.{i}.{part}.weight" for i in after for part in ("up", "down")]
    for uses in pool.run(wander, 2, NOTHING_ELSE_CUT, [before] * 2 + [after] * 4, False, "none"):
        assert [name for name, _ in uses] == in_order
        for i, (_, gathers) in enumerate(uses):
            ahead = min(i + WANDERING_PREFETCH, len(in_order))
            assert gathers[: len(in_order)] == in_order[:ahead]


@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (2, 2, 1, 1)])
def test_a_weight_tied_across_blocks_stays_one_and_exact(pool: RankPool, shape: Shape) -> None:
    pool.run(wander, 4, shape, [(0, 1, 2), (0, 1, 2), (2, 0, 1), (0, 1)], True, "none")


# -- gathers ------------------------------------------------------------------------------------------------------------

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MATRICES = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
IN_ORDER = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{matrix}.weight" for i in range(2) for matrix in MATRICES),
    "lm_head.weight",
]
LOOKUP = IN_ORDER[0]


def train(pair: Pair, steps: int) -> None:
    for seed in range(steps):
        pair.zero_grad()
        pair.loss(seed).backward()


def watch_uses(pair: Pair, see: Callable[[str], None]) -> Callable[[], None]:
    """Call ``see`` with a weight's name before its module runs, and when the gradient of its output is there."""

    def before(module: nn.Module, args: Any, name: str) -> None:
        see(name)

    def after(module: nn.Module, args: Any, output: Tensor, name: str) -> None:
        if name != LOOKUP and torch._C._current_graph_task_id() == -1:  # not in a second forward
            output.register_hook(lambda _: see(name))

    hooks = []
    for weight in IN_ORDER:
        module = pair.model.get_submodule(weight.removesuffix(".weight"))
        hooks.append(module.register_forward_pre_hook(lambda m, a, w=weight: before(m, a, w)))
        hooks.append(module.register_forward_hook(lambda m, a, o, w=weight: after(m, a, o, w)))
    return lambda: [hook.remove() for hook in hooks] and None


def is_large_gather(flight: Flight) -> bool:
    return flight.kind == "all_gather" and flight.module in IN_ORDER


def watch_gathers(prefetch: int, checkpointing: Any) -> dict[str, Any]:
    """Uses in the third step, each with how many gathers had started by then; forward, and what is behind it."""
    pair = Pair(
        build("llama"),
        Grid.create(NOTHING_ELSE_CUT),
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
def test_so_many_gathers_are_ahead_of_use_and_in_its_order(
    pool: RankPool, prefetch: int, checkpointing: str
) -> None:
    for seen in pool.run(watch_gathers, 2, prefetch, checkpointing):
        gathers: list[Flight] = seen["gathers"]
        names = [flight.module for flight in gathers]
        forward = len(IN_ORDER)
        assert [name for name, _, _ in seen["forward"]] == IN_ORDER
        assert names[:forward] == IN_ORDER
        for i, (_, started, at_ns) in enumerate(seen["forward"]):
            # Those before it and so many more; where backward is next, what it needs first is still there.
            if i + prefetch <= forward:
                assert started == i + prefetch
            assert started >= min(i + prefetch, forward)
            (wait,) = gathers[i].waits_ns
            assert at_ns <= wait[0]
            if prefetch and i >= 1:
                assert gathers[i].issued_ns < seen["forward"][i][2]
            if not prefetch:
                assert gathers[i].issued_ns >= at_ns

        # A weight is gathered once for the second forward and backward together.
        uses: dict[str, int] = {}
        for name, started, _ in seen["backward"]:
            uses.setdefault(name, started)
        assert set(uses) == set(IN_ORDER) - {LOOKUP}
        kept = len(uses) - (len(names) - forward)
        assert 0 <= kept <= prefetch
        assert names[forward:] == list(uses)[kept:]
        for i, started in enumerate(uses.values()):
            ahead = started - forward + kept
            assert min(i + prefetch, len(uses)) <= ahead <= min(i + 1 + prefetch, len(uses))


# -- memory -------------------------------------------------------------------------------------------------------------

ROW_BYTES = 32 * 4
HEAD_BYTES, MLP_BYTES = 130 * ROW_BYTES, 64 * ROW_BYTES


def keep(keep_bytes: int, prefetch: int, checkpointing: Any) -> tuple[dict[str, int], Counter[str]]:
    """What is there between forward and backward, and how often a weight was gathered, in the third step."""
    pair = Pair(
        build("llama", vocab_size=130),
        Grid.create(NOTHING_ELSE_CUT),
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
        (HEAD_BYTES - 1, 0, 0),
        (HEAD_BYTES, 0, 1),
        (HEAD_BYTES + 2 * MLP_BYTES, 0, 3),
        (HEAD_BYTES + 2 * MLP_BYTES - 1, 0, 2),
        (HEAD_BYTES + 2 * MLP_BYTES, 2, 3),
        (PLENTY, 0, len(IN_ORDER)),
        (PLENTY, 4, len(IN_ORDER)),
    ],
)
def test_the_last_weights_of_forward_wait_for_backward_within_the_budget(
    pool: RankPool, keep_bytes: int, prefetch: int, count: int, checkpointing: str
) -> None:
    expected = set(IN_ORDER[len(IN_ORDER) - count :])
    for kept, gathers in pool.run(keep, 2, keep_bytes, prefetch, checkpointing):
        assert expected == set(kept) or (prefetch and expected < set(kept))
        assert len(kept) <= max(count, prefetch)
        if count >= prefetch:
            assert sum(kept.values()) <= keep_bytes
        once = expected | {LOOKUP} | set(kept)
        assert gathers == {name: 1 if name in once else 2 for name in IN_ORDER}


# -- gradients ----------------------------------------------------------------------------------------------------------


def is_large_gradient(flight: Flight) -> bool:
    return flight.purpose == "gradient" and flight.module in IN_ORDER


def go_on_without_the_other() -> tuple[int, int]:
    """Rank 1 begins its backward only when rank 0 is at the end of its own."""
    grid = Grid.create(NOTHING_ELSE_CUT)
    pair = Pair(build("llama"), grid, overlap(keep_bytes=PLENTY, in_flight_bytes=PLENTY))
    train(pair, 2)
    rank, word = dist.get_rank(), torch.zeros(1)
    flying: list[int] = []
    pair.zero_grad()
    with grid.collectives.recording() as flights:

        def at_the_end(_: Tensor) -> None:
            gradients_on_their_way = [f for f in flights if is_large_gradient(f)]
            flying.append(sum(not f.waits_ns for f in gradients_on_their_way))
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
    return flying[0], sum(map(is_large_gradient, flights))


def test_backward_goes_on_while_its_gradients_are_in_flight(pool: RankPool) -> None:
    flying, sent = pool.run(go_on_without_the_other, 2, timeout_s=30)[0]
    assert flying == sent - 1 == len(IN_ORDER) - 1


def gradient_flights(shape: Shape, options: dict[str, Any]) -> list[Flight]:
    """The collectives of a third step's backward."""
    grid = Grid.create(shape)
    pair = Pair(build("llama"), grid, overlap(**options))
    train(pair, 2)
    pair.zero_grad()
    rank = dist.get_rank()
    for layer in pair.model.get_submodule("model.layers").children():
        layer.register_full_backward_hook(lambda *_: time.sleep(0.002 * rank))  # no rank keeps another's time
    loss = pair.loss()
    with grid.collectives.recording() as flights:
        loss.backward()
    pair.stock_loss().backward()
    pair.assert_gradients()
    return flights


def is_waited_for_at_once(flights: list[Flight]) -> list[bool]:
    return [bool(a.waits_ns) and a.waits_ns[0][1] <= b.issued_ns for a, b in itertools.pairwise(flights)]


def test_gradients_that_may_not_overlap_are_waited_for_at_once(pool: RankPool) -> None:
    for flights in pool.run(gradient_flights, 4, (2, 2, 1, 1), {"gradients": False}):
        sent = [f for f in flights if f.purpose == "gradient"]
        assert Counter(f.kind for f in sent) == {
            k: len(IN_ORDER) + 1 for k in ("reduce_scatter", "all_reduce")
        }
        assert all(is_waited_for_at_once(sent))


def gradient_flights_on_a_slow_network(options: dict[str, Any]) -> list[Flight]:
    """No collective is done before it is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "is_done", lambda self: False)
        return gradient_flights(NOTHING_ELSE_CUT, options)


@pytest.mark.parametrize("in_flight_bytes", [0, 20_000, None])
def test_no_more_bytes_wait_than_may(pool: RankPool, in_flight_bytes: int | None) -> None:
    # Of two blocks, unless it is said: q and o, k and v, and the three of the MLP.
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
        # What may wait does, up to the largest gradient of a block.
        assert most > limit - MLP_BYTES


def block_of(flight: Flight) -> str:
    parts = flight.module.split(".")
    return parts[2] if parts[1] == "layers" else "none"


def test_sums_over_data_follow_one_block_behind_in_the_same_order_on_all_ranks(pool: RankPool) -> None:
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
        behind = [
            i for i, f in enumerate(sent) if f.axis == "z" and block_of(f) == following and i > of_block[-1]
        ]
        # Once the next block has a gradient, and before its second leaves.
        assert of_block[-1] < sums[0]
        assert len(behind) < 2 or sums[-1] < behind[1]


# -- precision, and which kind it is ------------------------------------------------------------------------------------


def payloads(precision: Any, bundle_bytes: int) -> tuple[dict[tuple[str, str], int], set[torch.dtype]]:
    grid = Grid.create((2, 2, 1, 1))
    pair = Pair(build("llama"), grid, overlap(bundle_bytes=bundle_bytes), precision=precision)
    seen: set[torch.dtype] = set()
    for name, module in pair.model.named_modules():
        if name.endswith(("proj", "norm", "lm_head", "embed_tokens")):
            module.register_forward_hook(lambda m, a, o: seen.add(local_weight(m, "weight").dtype))
    train(pair, 2)
    with grid.collectives.counting() as entries:
        train(pair, 1)
    stored = (*local_parameters(pair.model).values(), *local_gradients(pair.model).values())
    assert {tensor.dtype for tensor in stored} == {torch.float32}
    return {(e.axis, e.kind): e.payload_bytes for e in entries if e.purpose in ("weight", "gradient")}, seen


def test_bf16_halves_gathers_and_sums_in_fp32(pool: RankPool) -> None:
    for (wide, wide_seen), (half, half_seen) in zip(
        pool.run(payloads, 4, "fp32", BUNDLE_BYTES),
        pool.run(payloads, 4, "bf16", BUNDLE_BYTES // 2),
        strict=True,
    ):
        assert (wide_seen, half_seen) == ({torch.float32}, {torch.bfloat16})
        assert 2 * half["z", "all_gather"] == wide["z", "all_gather"]
        for sums in (("z", "reduce_scatter"), ("data", "all_reduce")):
            assert half[sums] == wide[sums] > 0


def note_on_weights(weights: Any) -> str:
    report = ff.parallelize(build("llama"), Grid.create(NOTHING_ELSE_CUT), weights=weights)
    (note,) = (note for note in report.notes if note.startswith("weights: "))
    return note


@pytest.mark.parametrize(
    ("weights", "kind", "why"),
    [("auto", "streamed", "auto"), ("streamed", "streamed", "asked for"), ("fsdp2", "fsdp2", "asked for")],
)
def test_the_report_says_which_kind_of_weights_and_why(
    pool: RankPool, weights: str, kind: str, why: str
) -> None:
    for note in pool.run(note_on_weights, 2, weights):
        assert note.startswith(f"weights: {kind} ({why}")


def unknown_kind() -> str:
    with pytest.raises(ValueError, match="fsdp3") as caught:
        ff.parallelize(build("llama"), Grid.create((1, 1, 1, 1)), weights="fsdp3")
    return str(caught.value)


def test_an_unknown_kind_of_weights_is_refused_with_the_choices(pool: RankPool) -> None:
    (message,) = pool.run(unknown_kind, 1)
    assert all(word in message for word in ("auto", "fsdp2", "streamed"))


# -- modules that do not fit the picture ----------------------------------------------------------------------------------


@dataclass
class Box:
    """An output that hides its tensor from whoever looks for tensors."""

    inside: Tensor


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_parameter("weight", nn.Parameter(torch.randn(32, 32)))

    def forward(self, x: Tensor) -> Box:
        return Box(self.linear(x) @ self.weight)


class Odd(nn.Module):
    """A boxed output in the middle; around it a table that its module looks up and the model multiplies with."""

    def __init__(self, lookup_first: bool) -> None:
        super().__init__()
        self.table, self.boxing = nn.Embedding(64, 32), Boxing()
        self.lookup_first = lookup_first

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        if self.lookup_first:
            h = self.boxing(self.table(ids) + x).inside
            return nn.functional.linear(h, self.table.weight).square().mean(dim=(1, 2)).sum()
        h = nn.functional.linear(x, self.table.weight.t() @ self.table.weight)
        return (self.boxing(h).inside * self.table(ids)).square().mean(dim=(1, 2)).sum()


def train_an_odd_model(lookup_first: bool) -> int:
    grid = Grid.create(NOTHING_ELSE_CUT)
    torch.manual_seed(0)
    stock, ids, x = Odd(lookup_first), torch.randint(64, (4, 5)), torch.randn(4, 5, 32)
    model = copy.deepcopy(stock)
    report = ff.parallelize(model, grid, weights="streamed", overlap=overlap())
    rows = grid.local_rows(4)
    for _ in range(3):
        stock.zero_grad()
        model.zero_grad()
        stock(ids, x).backward()
        model(ids[rows], x[rows]).backward()
        assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    return len(gathered(model))


@pytest.mark.parametrize("lookup_first", [True, False])
def test_weights_that_no_hook_asks_for_again_stay_until_backward(pool: RankPool, lookup_first: bool) -> None:
    assert pool.run(train_an_odd_model, 2, lookup_first) == [0, 0]
