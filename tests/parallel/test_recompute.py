"""Blocks that backward recomputes, all of them or what takes little time: the same bits, and nothing expensive is done twice."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from tests.models import batch, build

Shape = tuple[int, int, int, int]
aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.addmm.default, aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out}
ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu.default}


class Operators(TorchDispatchMode):
    """Counts matmuls and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found["matmul"] += func in MATMULS
        self.found["attention"] += func in ATTENTION
        return func(*args, **(kwargs or {}))


def step(
    grid: Grid, kind: str, changes: dict[str, Any], checkpointing: Any, **options: Any
) -> tuple[list[Tensor], Counter[str], Counter[tuple[str, str]]]:
    """(the loss and the gradients of a step, its operators, its collectives by purpose and kind), after a first step."""
    model = build(kind, **changes)
    ff.parallelize(model, grid, activation_checkpointing=checkpointing, **options)
    ids = batch(4, 16)[0]
    ids = ids[grid.local_rows(len(ids))]
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    with Operators() as operators, grid.collectives.recording() as flights:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    found = [loss.detach(), *(p.grad._local_tensor.clone() for p in model.parameters())]  # type: ignore[union-attr]
    sent = Counter((flight.purpose, flight.kind) for flight in flights)
    return found, operators.found, sent


def compare(shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    grid = Grid.create(shape)
    # Selective blocks gather their inputs again, and so does this one.
    again = {"overlap": ff.Overlap(keep_inputs=False)} | options
    kept, operators, sent = step(grid, kind, changes, "none", **again)
    for checkpointing in ("selective", "full"):
        found, those, sent_now = step(grid, kind, changes, checkpointing, **options)
        for a, b in zip(kept, found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        if checkpointing == "selective":
            assert those == operators
            assert sent_now == sent
        else:
            assert those["matmul"] > operators["matmul"]
            assert those["attention"] == 2 * operators["attention"]


@pytest.mark.parametrize(
    ("shape", "kind", "changes", "options"),
    [
        ((1, 2, 1, 1), "llama", {}, {"weights": "fsdp2"}),
        ((1, 1, 1, 2), "llama", {}, {"weights": "fsdp2"}),
        ((1, 1, 2, 1), "llama", {}, {"weights": "streamed"}),
        ((1, 1, 1, 2), "gpt2", {}, {"weights": "fsdp2", "activations": "replicated"}),
        ((1, 1, 2, 1), "qwen3", {}, {"weights": "fsdp2"}),
        ((1, 2, 1, 1), "gpt2", {}, {"weights": "streamed"}),
    ],
)
def test_the_same_bits_and_nothing_expensive_twice(
    pool: RankPool, shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    pool.run(compare, 2, shape, kind, changes, options)


# -- what is refused, and what is omitted -----------------------------------------------------------------------------


def twice(checkpointing: Any) -> None:
    grid = Grid.create((1, 1, 1, 2))
    model = build("llama")
    ff.parallelize(model, grid, activation_checkpointing=checkpointing, weights="fsdp2")
    ids = batch(2, 16)[0]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_through_one_graph_is_rejected(pool: RankPool) -> None:
    with pytest.raises(Exception, match=r"model\.layers\.1 is recomputed a second time.*'full'"):
        pool.run(twice, 2, "selective")


class _InPlace(nn.Module):
    """Changes the output of a linear in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        output: Tensor = self.inner(*args)
        return output.mul_(2.0)


def in_place() -> None:
    grid = Grid.create((1, 1, 1, 2))
    model = build("llama")
    ff.parallelize(model, grid, activation_checkpointing="selective", weights="fsdp2")
    layer: Any = model.model.layers[1].self_attn
    layer.o_proj = _InPlace(layer.o_proj)
    ids = batch(2, 16)[0]
    model(input_ids=ids, labels=ids).loss.backward()


def test_a_kept_output_that_is_changed_in_place_is_found(pool: RankPool) -> None:
    with pytest.raises(Exception, match=r"model\.layers\.1 changes the output of a linear in place"):
        pool.run(in_place, 2)


def last_products(shape: Shape, kind: str) -> tuple[int, int]:
    """How often the last linear of a block sends its output: without recomputation, and with."""
    grid = Grid.create(shape)
    found = []
    for checkpointing in ("none", "full"):
        model = build(kind)
        ff.parallelize(model, grid, activation_checkpointing=checkpointing, weights="fsdp2")
        ids = batch(2, 16)[0]
        with grid.collectives.recording() as flights:
            model(input_ids=ids, labels=ids).loss.backward()
        reduced = [
            f for f in flights if f.module.endswith("layers.0.mlp.down_proj") and f.kind == "reduce_scatter"
        ]
        found.append(len(reduced))
    return found[0], found[1]


def test_the_output_that_only_the_next_block_reads_is_not_sent_again(pool: RankPool) -> None:
    assert pool.run(last_products, 2, (1, 1, 1, 2), "llama") == [(1, 1)] * 2
    # Here a norm follows, whose backward needs it.
    assert pool.run(last_products, 2, (1, 1, 1, 2), "gemma2") == [(1, 2)] * 2


class _Aside(nn.Module):
    """A block's MLP that puts something aside that it computes from its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.aside: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.inner(hidden_states)
        self.aside.append(output.square().sum())
        return output


def put_aside() -> None:
    grid = Grid.create((1, 1, 1, 2))
    ids = batch(2, 16)[0]
    found = []
    for checkpointing in ("none", "full", "selective"):
        model = build("llama")
        ff.parallelize(
            model, grid, activation_checkpointing=checkpointing, weights="fsdp2", activations="replicated"
        )
        layer: Any = model.model.layers[0]
        layer.mlp = _Aside(layer.mlp)
        loss = model(input_ids=ids, labels=ids).loss
        (loss + layer.mlp.aside[0]).backward()
        found.append([p.grad._local_tensor.clone() for p in model.parameters()])  # type: ignore[union-attr]
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_an_output_that_something_else_needs_is_computed_again(pool: RankPool) -> None:
    pool.run(put_aside, 2)
