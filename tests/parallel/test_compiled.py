"""Blocks that are compiled: one graph for all of them, with the same bits as without where the graph's operators are the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh import operators
from fourfold.parallel import compiled
from tests.models import batch, build

Shape = tuple[int, int, int, int]


def step(grid: Grid, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> list[Tensor]:
    """The losses and gradients of two steps, the second of two micro-batches; the first forward is not compiled."""
    model = build(kind, **changes)
    ff.parallelize(model, grid, weights="fsdp2", **options)
    ids = batch(4, 16)[0]
    ids = ids[grid.local_rows(len(ids))]
    model(input_ids=ids, labels=ids).loss.backward()
    found: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        with ff.no_sync(model):
            model(input_ids=ids, labels=ids).loss.backward()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients: list[Any] = [p.grad for p in model.parameters()]
        found += [loss.detach(), *(getattr(g, "_local_tensor", g).clone() for g in gradients)]
    return found


def compare(shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """(graphs, breaks); raises if a bit differs."""
    compiled.BACKEND = "aot_eager"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    grid = Grid.create(shape)
    right = step(grid, kind, changes, options)
    for mine, expected in zip(step(grid, kind, changes, options | {"compile": True}), right, strict=True):
        assert torch.equal(mine, expected)
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("shape", "kind", "changes", "options"),
    [
        ((1, 2, 1, 1), "llama", {}, {"activation_checkpointing": "selective"}),
        ((1, 1, 1, 2), "llama", {"num_hidden_layers": 3}, {}),
        ((1, 1, 2, 1), "qwen3", {}, {"activation_checkpointing": "full", "accumulation": "sharded"}),
        pytest.param((1, 1, 1, 2), "gpt2", {}, {"activation_checkpointing": "selective", "precision": "bf16"}, marks=pytest.mark.nightly),
        ((1, 1, 1, 2), "qwen2", {"num_key_value_heads": 1}, {"activations": "replicated"}),
        pytest.param((1, 1, 2, 1), "llama", {}, {"overlap": ff.Overlap(keep_inputs=False)}, marks=pytest.mark.nightly),
        pytest.param((2, 1, 1, 1), "gpt2", {}, {}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 1), "gemma2", {}, {"precision": "bf16"}, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_one_graph_with_the_same_bits(
    pool: RankPool, shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    for graphs, breaks in pool.run(compare, 2, shape, kind, changes, options):
        # Gemma 2 has two kinds of blocks, with and without a sliding window.
        assert graphs == (2 if kind == "gemma2" else 1)
        assert breaks == 0


def forget(shape: Shape) -> bool:
    """Are the bits the same if the operator of a norm's sum is left out?"""
    real = operators.TracedSum.forward

    def forward(ctx: Any, tensor: Tensor, *rest: Any) -> Tensor:
        real(ctx, tensor, *rest)
        return tensor.clone()

    operators.TracedSum.forward = forward  # type: ignore[method-assign,assignment]
    try:
        compare(shape, "llama", {}, {})
    except AssertionError:
        return False
    finally:
        operators.TracedSum.forward = real  # type: ignore[method-assign]
    return True


def test_a_sum_that_is_left_out_is_found(pool: RankPool) -> None:
    assert pool.run(forget, 2, (1, 1, 2, 1)) == [False, False]
