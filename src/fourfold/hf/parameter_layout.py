"""Which piece of a Hugging Face tensor a parameter is, and which piece of that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fourfold.mesh.axes import AXES, Axis
from fourfold.mesh.grid import Grid


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter: a rectangle of the tensor ``hf_name``, cut over the axes y and x, then over z.

    A packed projection (q, k and v in one tensor) is several parameters, one for each rectangle, because each of
    them is cut over the ranks for itself.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    # axis -> the dim that it cuts; an axis that is missing holds replicas
    cuts: Mapping[Axis, int] = field(default_factory=dict)

    @staticmethod
    def whole(hf_name: str, tensor: Tensor, cuts: Mapping[Axis, int] | None = None) -> ParameterLayout:
        shape = tuple(tensor.shape)
        return ParameterLayout(hf_name, shape, (0,) * len(shape), shape, dict(cuts or {}))

    @staticmethod
    def rows(whole: ParameterLayout, dim: int, start: int, length: int) -> ParameterLayout:
        """The same tensor from ``start`` on along ``dim``, ``length`` long."""
        starts, shape = list(whole.start), list(whole.shape)
        starts[dim], shape[dim] = start, length
        return ParameterLayout(whole.hf_name, whole.hf_shape, tuple(starts), tuple(shape), whole.cuts)

    def block(self, grid: Grid, place: Mapping[Axis, int] | None = None) -> tuple[slice, ...]:
        """What of the parameter this rank's place on y and x holds, all of z together; relative to the parameter.

        ``place``: that of another rank, by its coordinates.
        """
        index = [slice(0, size) for size in self.shape]
        for axis, dim in self.cuts.items():
            which = grid.coordinate(axis) if place is None else place[axis]
            index[dim] = chunk(self.shape[dim], grid.size(axis), which)
        return tuple(index)

    def shard(self, grid: Grid, place: Mapping[Axis, int] | None = None) -> tuple[slice, ...]:
        """What of the parameter this rank stores, or the one at ``place``; relative to the parameter."""
        index = list(self.block(grid, place))
        outer = index[0]
        inner = chunk(outer.stop - outer.start, grid.z, grid.coordinate("z") if place is None else place["z"])
        index[0] = slice(outer.start + inner.start, outer.start + inner.stop)
        return tuple(index)

    def in_hf(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The same piece, relative to the Hugging Face tensor."""
        return tuple(slice(s + i.start, s + i.stop) for s, i in zip(self.start, index, strict=True))

    def placements(self) -> list[Placement]:
        return [Shard(self.cuts[axis]) if axis in self.cuts else Replicate() for axis in AXES]

    def parameter(self, source: Tensor, grid: Grid) -> nn.Parameter:
        """This rank's block of a tensor, as a DTensor on the grid, still whole over data and z.

        ``source`` is the Hugging Face tensor, on any device; on ``meta`` nothing is allocated.
        """
        piece = source.detach()[self.in_hf(self.block(grid))]
        if not piece.is_meta:
            piece = piece.to(grid.device)
        # A copy, so that the source can be freed; contiguous, as FSDP2 wants it.
        local = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
        local.copy_(piece)
        stride = torch.empty(self.shape, device="meta").stride()
        sharded = DTensor.from_local(
            local,
            grid.mesh,
            self.placements(),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=stride,
        )
        return nn.Parameter(sharded, requires_grad=source.requires_grad)


def chunk(length: int, parts: int, which: int) -> slice:
    """Part ``which`` of ``length`` things dealt out as `torch.chunk` and DTensor do: equal parts, the last ones shorter.

    Example:
        >>> [chunk(11, 4, i) for i in range(4)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 11, None)]
    """
    size = -(-length // parts)
    return slice(min(which * size, length), min((which + 1) * size, length))
