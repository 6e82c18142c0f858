"""Choose the back end that stores a model's weights over z, and apply it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from fourfold.mesh.grid import Grid
from fourfold.weights.api import Accumulation, Precision, Weights
from fourfold.weights.fsdp2 import Fsdp2Weights
from fourfold.weights.overlap import Overlap
from fourfold.weights.streamed import StreamedWeights


def choose_weights(weights: Weights, grid: Grid) -> tuple[Weights, str]:
    """The back end to use, and why."""
    if weights != "auto":
        return weights, "asked for"
    if grid.shape == (1, 1, 1, 1):
        return "streamed", "auto: one rank, nothing to gather"
    if grid.target == "cuda":
        return "fsdp2", "auto: PyTorch's own, for CUDA"
    return "streamed", f"auto: overlaps on {grid.target}, where FSDP2 has no streams to do so"


def shard_weights(
    model: nn.Module,
    grid: Grid,
    blocks: Sequence[nn.Module],
    precision: Precision,
    weights: Weights,
    overlap: Overlap,
    *,
    half_batches: Callable[[], int],
    embedding: nn.Module | None = None,
    head: nn.Module | None = None,
    keeps_head: bool = True,
    accumulation: Accumulation = "whole",
    is_compiled: bool = False,
    owners: Collection[nn.Module] = (),
) -> None:
    """Shard every parameter over z.

    Master weights and the reduction of gradients are fp32 in either precision; in bf16 the gathered weights, and so
    the computation, are bf16. ``half_batches`` tells how many parts of a batch are in the model now; ``embedding`` and
    ``head`` are those that are not tied. ``keeps_head``: backward reads the head's weight. ``is_compiled``: the blocks are. ``owners``: experts that
    each z rank computes with those that it stores.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def stream(*, only_owned: bool) -> StreamedWeights:
        return StreamedWeights(
            model,
            grid,
            blocks,
            dtype,
            overlap,
            half_batches,
            accumulation,
            is_compiled,
            owners,
            only_owned=only_owned,
        )

    if weights == "streamed":
        stream(only_owned=False)
    else:
        owned = stream(only_owned=True) if owners else None
        Fsdp2Weights(model, grid, blocks, precision, embedding, head, keeps_head, accumulation, owners, owned)
