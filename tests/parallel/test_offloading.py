"""Inputs of recomputed blocks that wait for backward on the host: the same bits, however late the copies are."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from benchmarks.ranks import RankError, RankPool
from fourfold import Grid
from fourfold.dry_run.recorder import replaced
from fourfold.mesh.offloading import Copy, _Input
from fourfold.parallel import compiled, parallelize
from fourfold.weights.api import evaluating
from tests.late import LateCopies, Seen
from tests.models import batch, build

Shape = tuple[int, int, int, int]
BLOCKS = 3
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}
WAYS: dict[str, tuple[Shape, str, dict[str, Any]]] = {
    "fsdp2": ((1, 2, 1, 1), "llama", {"weights": "fsdp2"} | FULL),
    "streamed, sequence-parallel": ((1, 1, 1, 2), "llama", {"weights": "streamed"} | FULL),
    "two half-batches, selective": (
        (1, 1, 2, 1),
        "llama",
        {"weights": "streamed", "overlap": ff.Overlap(interleave=True)} | SELECTIVE,
    ),
    "compiled": ((1, 1, 1, 2), "llama", {"compile": True} | FULL),
    "compiled, selective, some blocks": (
        (1, 1, 2, 1),
        "qwen3",
        {"compile": True, "checkpointed_blocks": 2} | SELECTIVE,
    ),
    "fsdp2, some blocks": (
        (1, 1, 1, 2),
        "llama",
        {"weights": "fsdp2", "checkpointed_blocks": 2, "overlap": ff.Overlap(keep_inputs=False)} | SELECTIVE,
    ),
    "fsdp2, full and selective": (
        (1, 1, 2, 1),
        "gpt2",
        {"weights": "fsdp2", "checkpointed_blocks": 2, "accumulation": "sharded"} | FULL,
    ),
    "replicated": (
        (1, 1, 1, 2),
        "gemma2",
        {"weights": "streamed", "activations": "replicated", "precision": "bf16"} | FULL,
    ),
}
IN_CI = ("fsdp2", "two half-batches, selective")


@contextmanager
def late_copies() -> Iterator[LateCopies]:
    """Models that are made parallel inside offload to a "host"."""
    copies = LateCopies(Seen())
    with replaced(parallelize, "copies_of", lambda grid: copies):
        yield copies


def steps(grid: Grid, kind: str, options: dict[str, Any]) -> tuple[list[Tensor], int, int]:
    """The losses and gradients of a step of one micro-batch and of one of two, also after forwards without backward; in how many parts
    a batch is in the model, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(kind, num_hidden_layers=BLOCKS)
    report = ff.parallelize(model, grid, **options)
    found: list[Tensor] = []
    ids = batch(4, 16)[0]
    ids = ids[grid.local_rows(len(ids))]

    def take() -> None:
        gradients: list[Any] = [p.grad for p in model.parameters()]
        found.extend(getattr(g, "_local_tensor", g).clone() for g in gradients)
        model.zero_grad()

    model(input_ids=ids, labels=ids).loss.backward()
    take()
    with evaluating(model):
        found.append(model(input_ids=ids, labels=ids).loss)
    model(input_ids=ids, labels=ids)
    gc.collect()  # otherwise its graph may be there in the next backward, which would have its input copied back
    with ff.no_sync(model):
        model(input_ids=ids, labels=ids).loss.backward()
    # A batch of another size, but for compiled blocks, which would be another graph.
    short = ids if options.get("compile") else ids[:, :8]
    loss = model(input_ids=short, labels=short).loss
    loss.backward()
    found.append(loss.detach())
    take()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found, 2 if report.interleaved else 1, graphs


def compare(way: str) -> tuple[bool, Seen, int, int]:
    """Are late copies bit-equal to inputs that stay on the device? What was seen; how many inputs came back; parts of a batch."""
    compiled.BACKEND = "aot_eager"
    shape, kind, options = WAYS[way]
    grid = Grid.create(shape)
    kept, _, graphs = steps(grid, kind, options)
    with late_copies() as copies:
        offloaded, parts, more = steps(grid, kind, options | {"activation_offloading": True})
    assert graphs == more
    assert (graphs > 0) == ("compile" in options)
    is_equal = all(torch.equal(a, b) for a, b in zip(kept, offloaded, strict=True))
    return is_equal, copies.seen, copies.from_host, parts


@pytest.mark.parametrize(
    "way", [way if way in IN_CI else pytest.param(way, marks=pytest.mark.nightly) for way in WAYS]
)
def test_the_same_bits(pool: RankPool, way: str) -> None:
    options = WAYS[way][2]
    is_partial = options["activation_checkpointing"] == "selective"
    blocks = options.get("checkpointed_blocks", BLOCKS) if is_partial else BLOCKS
    for is_equal, seen, from_host, parts in pool.run(compare, 2, way):
        assert seen.changed == []
        assert is_equal
        # Four forwards with gradients, three of them with a backward; the last input is still on the device.
        assert seen.started - from_host == 4 * parts * blocks
        assert from_host == 3 * parts * (blocks - 1)


# -- planted faults ---------------------------------------------------------------------------------------------------


def without(fault: str) -> tuple[bool, list[str]]:
    with ExitStack() as stack:
        if fault == "waits":
            stack.enter_context(replaced(Copy, "__init__", _without_wait))
        if fault == "the wait before memory is freed":
            stack.enter_context(
                replaced(_Input, "leave_device", lambda self: vars(self).update(_device=None))
            )
        if fault == "record_stream":
            stack.enter_context(replaced(LateCopies, "will_free", lambda *_: None))
        is_equal, seen, *_ = compare("fsdp2")
    return is_equal, seen.changed


def _without_wait(copy: Copy, result: Any, wait: Any) -> None:
    copy.result, copy.wait = result, lambda: None


@pytest.mark.parametrize("fault", ["waits", "the wait before memory is freed", "record_stream"])
def test_a_planted_fault_is_found(pool: RankPool, fault: str) -> None:
    for is_equal, changed in pool.run(without, 2, fault):
        assert not is_equal or any("the freed input of model.layers" in line for line in changed)
        assert is_equal == (fault == "record_stream")  # then what is lost is not needed


# -- other orders of forward and backward -----------------------------------------------------------------------------


def other_orders(is_offloaded: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients of two forwards before their backward, in both orders, of two backwards through one graph, and of a part of one."""
    grid = Grid.create((1, 1, 1, 1))
    with late_copies() as copies:
        model = build("llama", num_hidden_layers=BLOCKS)
        ff.parallelize(model, grid, weights="fsdp2", activation_offloading=is_offloaded, **FULL)
        first, second = (batch(2, 16, seed=seed)[0] for seed in (2, 3))
        found: list[Tensor] = []
        on_device: list[int] = []

        def forward(ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            on_device.append(copies.on_device())
            return loss

        def take() -> None:
            found.extend(getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters())
            model.zero_grad()
            on_device.append(copies.on_device())

        (forward(first) + forward(second)).backward()
        take()
        losses = [forward(first), forward(second)]
        for loss in losses:
            loss.backward()
        del loss, losses
        take()
        loss = forward(first)
        loss.backward(retain_graph=True)
        loss.backward()
        take()
        seen: list[Tensor] = []
        layer: Any = model.model.layers[-1]
        hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        loss = forward(first)
        hook.remove()
        found += torch.autograd.grad(loss, seen)
        seen.clear()
        del loss
        model.zero_grad()
        forward(second).backward()
        take()
    assert copies.seen.changed == []
    return found, on_device


def test_other_orders_of_forward_and_backward(pool: RankPool) -> None:
    (kept, _), (offloaded, on_device) = (pool.run(other_orders, 1, off)[0] for off in (False, True))
    assert len(kept) == len(offloaded)
    assert all(torch.equal(a, b) for a, b in zip(kept, offloaded, strict=True))
    # After each forward the last input alone is on the device, and none when all is dropped.
    assert on_device == [1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0]


# -- what is refused --------------------------------------------------------------------------------------------------


class _ByName(nn.Module):
    """A block that gets its input by its name."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, **others: Any) -> Any:
        return self.block(hidden_states=hidden_states, **others)


def refused(kind: str) -> None:
    def change(input: Tensor) -> None:
        input.detach().add_(1.0)

    grid = Grid.create((1, 1, 1, 1))
    with late_copies():
        model = build("llama", num_hidden_layers=BLOCKS)
        ff.parallelize(model, grid, weights="fsdp2", activation_offloading=True, **FULL)
        layers: Any = model.model.layers
        if kind == "in place":
            layers[0].register_forward_hook(lambda module, args, output: change(args[0]))
        else:
            layers[0] = _ByName(layers[0])
        ids = batch(2, 16)[0]
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("in place", r"the input of model\.layers\.0 is changed in place .* use activation_offloading=False"),
        ("by name", r"model\.layers\.0 gets its input by its name.* use activation_offloading=False"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(pool: RankPool, kind: str, why: str) -> None:
    with pytest.raises(RankError, match=why):
        pool.run(refused, 1, kind)


def notes(options: dict[str, Any]) -> tuple[str, ...]:
    model = build("llama")
    return ff.parallelize(model, Grid.create((1, 1, 1, 1)), activation_offloading=True, **options).notes


def test_where_it_has_no_effect_the_report_says_so(pool: RankPool) -> None:
    assert "activation_offloading=True has no effect on cpu; leave it out" in pool.run(notes, 1, FULL)[0]
