"""Gradient clipping by the global norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fourfold.mesh.axes import AXES, Axis
from fourfold.mesh.grid import Grid


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, grid: Grid) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before clipping.

    The norm is that of the unsharded model: a gradient that several ranks hold as replicas counts once.

    Example:
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> norm = clip_grad_norm_(model.parameters(), 1.0, grid)
        >>> float(norm) > 0
        True
    """
    by_replicas: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor):
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} is not on the grid; pass the parameters of a model that "
                "parallelize() has taken"
            )
        replicas = 1
        # The mesh of the gradient: all axes, or z alone if x = y = 1.
        axes = cast(tuple[Axis, ...], gradient.device_mesh.mesh_dim_names)
        for axis, placement in zip(axes, gradient.placements, strict=True):
            if axis != "data" and isinstance(placement, Replicate):
                replicas *= grid.size(axis)
        by_replicas[replicas].append(gradient._local_tensor)

    square = torch.zeros((), device=grid.device)
    for replicas, gradients in by_replicas.items():
        square += torch.nn.utils.get_total_norm(gradients).float().square() / replicas
    summed: tuple[Axis, ...] = ("x", "y", "z")
    for axis in summed:
        grid.collectives.all_reduce(square, axis, "clip").wait()
    norm = square.sqrt()
    # Each sum was taken in several communicators, whose order of adding may differ: one bit pattern on all ranks, because
    # an ulp in the scale would make replicas drift apart.
    for axis in AXES:
        grid.collectives.all_reduce(norm, axis, "clip", dist.ReduceOp.MAX).wait()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in by_replicas.values():
        torch._foreach_mul_(gradients, scale)
    return norm
