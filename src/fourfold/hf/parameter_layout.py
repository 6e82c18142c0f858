"""The part of a Hugging Face tensor that a parameter is, and the shard of it that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fourfold.mesh.axes import AXES, Axis
from fourfold.mesh.grid import Grid

Index = tuple[slice | int, ...]


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter: a rectangle of the tensor ``hf_name``, sharded over the axes y and x, then over z.

    A packed projection (q, k and v in one tensor) is several parameters, one for each rectangle, because each of them
    is sharded separately. Where the code of a model needs the halves of a tensor as one, there is one parameter: the tensor seen with
    a dim more, [E, 2f, h] as [E, 2, f, h], of which that dim is sharded.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    # axis -> the dim that it shards; a missing axis holds replicas. Of two axes on one dim y is the outer one, as in DTensor.
    cuts: Mapping[Axis, int] = field(default_factory=dict)
    # The dim of the Hugging Face tensor that is seen as two, halves and what is in them; all numbers but ``hf_shape`` count both.
    halved: int | None = None

    @staticmethod
    def whole(hf_name: str, tensor: Tensor, cuts: Mapping[Axis, int] | None = None) -> ParameterLayout:
        shape = tuple(tensor.shape)
        return ParameterLayout(hf_name, shape, (0,) * len(shape), shape, dict(cuts or {}))

    @staticmethod
    def rows(whole: ParameterLayout, dim: int, start: int, length: int) -> ParameterLayout:
        """The rectangle of the same tensor with ``length`` entries from ``start`` on along ``dim``."""
        starts, shape = list(whole.start), list(whole.shape)
        starts[dim], shape[dim] = start, length
        return ParameterLayout(
            whole.hf_name, whole.hf_shape, tuple(starts), tuple(shape), whole.cuts, whole.halved
        )

    @staticmethod
    def halves(hf_name: str, tensor: Tensor, dim: int, cuts: Mapping[Axis, int]) -> ParameterLayout:
        """A whole tensor with two halves along ``dim``; in ``cuts`` the dim after it is that of their entries."""
        hf_shape = tuple(tensor.shape)
        shape = (*hf_shape[:dim], 2, hf_shape[dim] // 2, *hf_shape[dim + 1 :])
        return ParameterLayout(hf_name, hf_shape, (0,) * len(shape), shape, dict(cuts), dim)

    def block(self, grid: Grid, place: Mapping[Axis, int] | None = None) -> tuple[slice, ...]:
        """The slice of the parameter for this rank's coordinates on y and x, unsharded over z; relative to the parameter.

        ``place``: the coordinates of another rank.
        """
        index = [slice(0, size) for size in self.shape]
        for axis in (axis for axis in AXES if axis in self.cuts):
            which = grid.coordinate(axis) if place is None else place[axis]
            dim = self.cuts[axis]
            index[dim] = _part(index[dim], grid.size(axis), which)
        return tuple(index)

    def shard(self, grid: Grid, place: Mapping[Axis, int] | None = None) -> tuple[slice, ...]:
        """The slice of the parameter that this rank stores, or the rank at ``place``; relative to the parameter."""
        index = list(self.block(grid, place))
        dim = dim_over_z(self.shape, self.cuts, grid)
        index[dim] = _part(index[dim], grid.z, grid.coordinate("z") if place is None else place["z"])
        return tuple(index)

    def boxes(self, index: tuple[slice, ...]) -> list[tuple[Index, tuple[slice, ...]]]:
        """The rectangles of the Hugging Face tensor that a slice of the parameter is: (which part of the slice, where in the tensor)."""
        place = tuple(slice(s + i.start, s + i.stop) for s, i in zip(self.start, index, strict=True))
        if self.halved is None:
            return [(tuple(slice(None) for _ in place), place)]
        dim, found = self.halved, list[tuple[Index, tuple[slice, ...]]]()
        width = self.hf_shape[dim] // 2
        for half in range(place[dim].start, place[dim].stop):
            entries = slice(half * width + place[dim + 1].start, half * width + place[dim + 1].stop)
            inside = tuple(half - place[dim].start if d == dim else slice(None) for d in range(len(place)))
            found.append((inside, (*place[:dim], entries, *place[dim + 2 :])))
        return found

    def seen(self, whole: Tensor) -> Tensor:
        """The Hugging Face tensor with the dims that the parameter has; a view."""
        return whole if self.halved is None else whole.unflatten(self.halved, (2, -1))

    def of(self, whole: Tensor, index: tuple[slice, ...]) -> Tensor:
        """A slice of the parameter, as a view of the Hugging Face tensor."""
        return self.seen(whole)[
            tuple(slice(s + i.start, s + i.stop) for s, i in zip(self.start, index, strict=True))
        ]

    def placements(self) -> list[Placement]:
        return [Shard(self.cuts[axis]) if axis in self.cuts else Replicate() for axis in AXES]

    def parameter(self, source: Tensor, grid: Grid) -> nn.Parameter:
        """This rank's block of a tensor, as a DTensor on the grid, not yet sharded over z.

        ``source`` is the Hugging Face tensor, on any device; on ``meta`` nothing is allocated.
        """
        block = self.of(source.detach(), self.block(grid))
        if not block.is_meta:
            block = block.to(grid.device)
        # A copy, so that the source can be freed; contiguous, as FSDP2 requires.
        local = torch.empty_like(block, memory_format=torch.contiguous_format)
        local.copy_(block)
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


def dim_over_z(shape: Sequence[int], cuts: Mapping[Axis, int], grid: Grid) -> int:
    """The dim of a parameter that is sharded over z: the first, or the next that z divides if there are three or more.

    The first dim of a fused expert tensor counts its experts, which may be fewer than z.
    """
    if len(shape) < 3 or grid.z == 1:
        return 0
    parts = [
        grid.z * math.prod(grid.size(a) for a, d in cuts.items() if d == dim) for dim in range(len(shape))
    ]
    return next((dim for dim, size in enumerate(shape) if size % parts[dim] == 0), 0)


def sharded_dim(parameter: Tensor, grid: Grid) -> int:
    """`dim_over_z` of a parameter that is not sharded over z yet: a DTensor on the grid, or, with x = y = 1, a plain tensor."""
    cuts: dict[Axis, int] = {}
    if isinstance(parameter, DTensor):
        cuts = {a: p.dim for a, p in zip(AXES, parameter.placements, strict=True) if isinstance(p, Shard)}
    return dim_over_z(parameter.shape, cuts, grid)


def chunk(length: int, parts: int, which: int) -> slice:
    """Chunk ``which`` of ``length`` split into ``parts`` as by `torch.chunk` and DTensor: the last ones may be shorter.

    Example:
        >>> [chunk(11, 4, i) for i in range(4)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 11, None)]
    """
    size = -(-length // parts)
    return slice(min(which * size, length), min((which + 1) * size, length))


def _part(outer: slice, parts: int, which: int) -> slice:
    inner = chunk(outer.stop - outer.start, parts, which)
    return slice(outer.start + inner.start, outer.start + inner.stop)


def checked_bounds(
    index: tuple[slice, ...], shape: tuple[int, ...], out: Tensor, name: str, where: str = ""
) -> list[tuple[int, int]]:
    """(start, stop) of a slice along each dim; it has to be within the ``shape`` of tensor ``name``, and to fit ``out``."""
    bounds = [(part.start, part.stop) for part in index]
    if len(bounds) != len(shape) or any(
        not 0 <= lo <= hi <= n for (lo, hi), n in zip(bounds, shape, strict=True)
    ):
        raise ValueError(f"{where}index {bounds} is not within the shape {list(shape)} of {name}")
    if list(out.shape) != [hi - lo for lo, hi in bounds]:
        raise ValueError(f"{where}slice {bounds} of {name} does not fit a tensor of shape {list(out.shape)}")
    return bounds


def describe(layouts: list[ParameterLayout]) -> str:
    """Where the parameters of a module are, in words."""
    parts = []
    for layout in layouts:
        on: dict[int, list[str]] = {}
        for axis in (axis for axis in AXES if axis in layout.cuts):
            on.setdefault(layout.cuts[axis], []).append(axis)
        cuts = ", ".join(f"dim {dim} on {' and '.join(axes)}" for dim, axes in sorted(on.items()))
        parts.append(f"{'x'.join(map(str, layout.shape))}: {cuts or 'replicated on y, x'}")
    return "; ".join(dict.fromkeys(parts))
