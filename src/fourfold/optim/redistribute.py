"""Whole matrices out of shards and back, for work that looks at a matrix as a whole.

Matrices that are cut alike are dealt to the ranks that hold their shards, one to each. Every rank has a table with a
place for each matrix of the deal, its own shard in it; an all-to-all over each axis that cuts turns the table of one
shard of each matrix into that of each shard of one matrix. The same way leads back. Ranks along an axis that does not
cut (data) hold replicas and do the same work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fourfold.hf.parameter_layout import ParameterLayout
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid


class MatrixRedistribute:
    """The way to whole matrices and back for all that are cut as ``layouts``, the parameters of one of them, say."""

    def __init__(self, layouts: Sequence[ParameterLayout], grid: Grid, dtype: torch.dtype) -> None:
        self._layouts, self._grid, self._dtype = tuple(layouts), grid, dtype
        first = self._layouts[0]
        assert all(layout.cuts == first.cuts for layout in layouts)
        candidates: tuple[Axis, ...] = ("z", "y", "x")
        self._axes = tuple(a for a in candidates if grid.size(a) > 1 and (a == "z" or a in first.cuts))
        self._table_shape = tuple(grid.size(axis) for axis in self._axes)
        # As long as the largest shard: those at the end may be smaller.
        origin: dict[Axis, int] = {"data": 0, "z": 0, "y": 0, "x": 0}
        self._lengths = [math.prod(_shape(layout.shard(grid, origin))) for layout in layouts]
        self.ranks = math.prod(self._table_shape)
        self.mine = 0  # which matrix of a deal is this rank's
        for axis in self._axes:
            self.mine = self.mine * grid.size(axis) + grid.coordinate(axis)

    def to_whole(self, matrices: Sequence[Sequence[Tensor]], name: str = "") -> Tensor | None:
        """Of up to ``ranks`` matrices, each given by this rank's shards, the one that is dealt to this rank."""
        table = torch.zeros(self.ranks, sum(self._lengths), dtype=self._dtype, device=self._grid.device)
        for row, shards in zip(table, matrices, strict=False):
            for slot, shard in zip(row.split(self._lengths), shards, strict=True):
                slot[: shard.numel()].view(shard.shape).copy_(shard)
        table = self._exchange(table, name)
        if self.mine >= len(matrices):
            return None
        whole = table.new_empty(self._layouts[0].hf_shape)
        for slot, index in self._slots(table):
            whole[index] = slot
        return whole

    def to_shards(self, whole: Tensor | None, count: int, name: str = "") -> list[list[Tensor]]:
        """This rank's shards of the ``count`` matrices of a deal, of which ``whole`` is this rank's."""
        table = torch.zeros(self.ranks, sum(self._lengths), dtype=self._dtype, device=self._grid.device)
        if whole is not None:
            for slot, index in self._slots(table):
                slot.copy_(whole[index])
        table = self._exchange(table, name)
        shapes = [_shape(layout.shard(self._grid)) for layout in self._layouts]
        return [
            [
                slot[: math.prod(shape)].view(shape)
                for slot, shape in zip(row.split(self._lengths), shapes, strict=True)
            ]
            for row in table[:count]
        ]

    def _exchange(self, table: Tensor, name: str) -> Tensor:
        table = table.view(*self._table_shape, -1)
        for dim, axis in enumerate(self._axes):
            sent = table.movedim(dim, 0).contiguous()
            received = torch.empty_like(sent)
            self._grid.collectives.all_to_all(received, sent, axis, "optimizer", module=name).wait()
            table = received.movedim(0, dim)
        return table.reshape(self.ranks, -1)

    def _slots(self, table: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Each shard of one matrix: where it is in the table, and where in the Hugging Face tensor."""
        places = itertools.product(*(range(size) for size in self._table_shape))
        for row, coordinates in zip(table, places, strict=True):
            place: dict[Axis, int] = {"data": 0, "z": 0, "y": 0, "x": 0}
            place.update(zip(self._axes, coordinates, strict=True))
            for slot, layout in zip(row.split(self._lengths), self._layouts, strict=True):
                index = layout.shard(self._grid, place)
                shape = _shape(index)
                yield slot[: math.prod(shape)].view(shape), layout.in_hf(index)


def _shape(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(piece.stop - piece.start for piece in index)
