"""Dropout on the grid: equal on replicas, independent elsewhere, the same when recomputed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from tests.models import (
    batch,
    build,
    local_gradients,
)

Shape = tuple[int, int, int, int]
# Small enough that the matrices of these models have their own collectives.
OVERLAP = ff.Overlap(bundle_bytes=1024)


DROPOUT = {
    "gpt2": {
        "resid_pdrop": 0.5,
        "embd_pdrop": 0.5,
        "attn_pdrop": 0.5,
        "attn_implementation": "eager",
    },
    "llama": {"attention_dropout": 0.5, "attn_implementation": "eager"},
}
CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()


def masked_step(model: nn.Module, ids: Tensor, kind: str) -> dict[str, dict[str, Tensor]]:
    """The residual stream after each block, and the mask of each dropout, in the forward of one step."""
    stream: dict[str, Tensor] = {}
    features: dict[str, Tensor] = {}
    attention: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():

        def see_dropout(
            module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name
        ) -> None:
            # Detached: recomputation, without hooks, saves for backward what the first forward has saved.
            kept = output.detach() != 0
            features[name] = kept
            torch.testing.assert_close(output.detach()[kept], args[0].detach()[kept] / (1 - module.p))

        def see_attention(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            attention[name] = output[1].detach()[..., CAUSAL] != 0

        def see_block(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            stream[name] = (output if isinstance(output, Tensor) else output[0]).detach()

        if isinstance(module, nn.Dropout) and not name.endswith("attn_dropout"):
            hooks.append(module.register_forward_hook(see_dropout))
        elif name.endswith((".attn", ".self_attn")):
            hooks.append(module.register_forward_hook(see_attention))
        elif name.rpartition(".")[0] in ("transformer.h", "model.layers"):
            hooks.append(module.register_forward_hook(see_block))
    loss = model(input_ids=ids, labels=ids).loss
    for hook in hooks:  # do not observe recomputation
        hook.remove()
    loss.backward()
    assert stream
    assert attention
    assert features or kind == "llama"
    return {"stream": stream, "features": features, "attention": attention}


def draw_masks(
    shape: Shape, kind: str, checkpointing: Any, weights: Any
) -> list[dict[str, dict[str, Tensor]]]:
    model = build(kind, **DROPOUT[kind])
    # Each part of the batch has the same tokens, so only the masks differ.
    ids = batch(1)[0].expand(2, -1)
    grid = Grid.create(shape)
    ff.parallelize(
        model,
        grid,
        activations="replicated",
        activation_checkpointing=checkpointing,
        seed=3,
        weights=weights,
        overlap=OVERLAP,
    )
    return [masked_step(model, ids, kind) for _ in range(2)]


def assert_independent(a: Tensor, b: Tensor) -> None:
    """Assert that two masks, which keep each value with probability 1/2, are independent."""
    n = a.numel()
    assert n == b.numel()
    agreeing = int((a.flatten() == b.flatten()).sum())
    assert abs(agreeing - n / 2) < 5 * math.sqrt(n / 4), f"{agreeing} of {n} agree"


def neighbour(rank: int, shape: Shape, axis: int) -> int:
    """The next rank along an axis, around its end."""
    stride = math.prod(shape[axis + 1 :])
    index = rank // stride % shape[axis]
    return rank + ((index + 1) % shape[axis] - index) * stride


@pytest.mark.parametrize(
    ("kind", "shape", "checkpointing", "weights"),
    [
        ("gpt2", (1, 2, 2, 2), "none", "streamed"),
        pytest.param("gpt2", (1, 2, 2, 2), "none", "fsdp2", marks=pytest.mark.nightly),
        pytest.param("gpt2", (2, 1, 2, 2), "full", "streamed", marks=pytest.mark.nightly),
        pytest.param("llama", (2, 2, 1, 2), "full", "streamed", marks=pytest.mark.nightly),
        ("llama", (2, 2, 1, 2), "full", "fsdp2"),
        pytest.param("llama", (1, 2, 2, 2), "none", "streamed", marks=pytest.mark.nightly),
    ],
)
def test_dropout_is_equal_on_replicas_and_independent_elsewhere(
    pool: RankPool, kind: str, shape: Shape, checkpointing: str, weights: str
) -> None:
    ranks = pool.run(draw_masks, 8, shape, kind, checkpointing, weights)
    for rank, passes in enumerate(ranks):
        for axis, size in enumerate(shape):
            if size == 1:
                continue
            for ours, theirs in zip(passes, ranks[neighbour(rank, shape, axis)], strict=True):
                if axis == 3:
                    for name, hidden in ours["stream"].items():
                        torch.testing.assert_close(hidden, theirs["stream"][name], rtol=0.0, atol=0.0)
                # After embeddings, attention and MLP, features are sharded over y; inside attention, heads are sharded over x.
                for sort, replicas in (("features", 3), ("attention", 2)):
                    for name, kept in ours[sort].items():
                        if axis == replicas:
                            assert torch.equal(kept, theirs[sort][name])
                        else:
                            assert_independent(kept, theirs[sort][name])
        # Masks differ between modules and between steps.
        for sort in ("features", "attention"):
            masks = [kept for one in passes for kept in one[sort].values()]
            for i, kept in enumerate(masks):
                assert abs(kept.float().mean().item() - 0.5) < 2.5 / math.sqrt(kept.numel())
                for other in masks[:i]:
                    assert_independent(kept, other)


def recompute_with_dropout(shape: Shape, kind: str, weights: Any) -> None:
    grid = Grid.create(shape)
    runs = []
    for checkpointing in ("none", "selective", "full"):
        model = build(kind, **DROPOUT[kind] | {"attn_implementation": "sdpa"})
        ff.parallelize(
            model, grid, activation_checkpointing=checkpointing, seed=4, weights=weights, overlap=OVERLAP
        )
        losses, found = [], []
        for seed in (5, 6):
            ids, labels = batch(8, seed=seed)
            rows = grid.local_rows(len(ids))
            loss = model(input_ids=ids[rows], labels=labels[rows]).loss
            loss.backward()
            losses.append(loss.item())
            found.append(local_gradients(model))
        runs.append((losses, found))
    (expected_losses, expected), *others = runs
    for losses, recomputed in others:
        assert losses == expected_losses
        for step, step_gradients in enumerate(recomputed):
            for name, gradient in step_gradients.items():
                torch.testing.assert_close(gradient, expected[step][name], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("kind", "shape", "weights"),
    [
        ("gpt2", (1, 2, 2, 2), "streamed"),
        ("llama", (2, 2, 1, 2), "fsdp2"),
        pytest.param("gpt2", (1, 2, 2, 2), "fsdp2", marks=pytest.mark.nightly),
        pytest.param("llama", (2, 2, 1, 2), "streamed", marks=pytest.mark.nightly),
    ],
)
def test_recomputation_draws_the_same_masks(pool: RankPool, kind: str, shape: Shape, weights: str) -> None:
    pool.run(recompute_with_dropout, 8, shape, kind, weights)
