"""Redistributes sharded matrices to full matrices and back, for optimizers that need a full matrix.

A batch of matrices that are sharded in the same way is assigned to the ranks that hold their shards, one matrix to each
rank. Every rank fills a table with its shard of each matrix of the batch; an all-to-all over each axis that shards turns
it into a table with every shard of one matrix. The same exchange leads back. Ranks along an axis that does not shard
(data) hold replicas and do the same work.
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
    """Exchanges shards for full matrices, for all matrices whose parameters have these ``layouts``."""

    def __init__(self, layouts: Sequence[ParameterLayout], grid: Grid, dtype: torch.dtype) -> None:
        self._layouts, self._grid, self._dtype = tuple(layouts), grid, dtype
        first = self._layouts[0]
        assert all(layout.cuts == first.cuts for layout in layouts)
        candidates: tuple[Axis, ...] = ("z", "y", "x")
        self._axes = tuple(a for a in candidates if grid.size(a) > 1 and (a == "z" or a in first.cuts))
        self._table_shape = tuple(grid.size(axis) for axis in self._axes)
        # The length of the largest shard: the last ones may be smaller.
        origin: dict[Axis, int] = {"data": 0, "z": 0, "y": 0, "x": 0}
        self._lengths = [math.prod(_shape(layout.shard(grid, origin))) for layout in layouts]
        self.ranks = math.prod(self._table_shape)
        self.mine = 0  # this rank's matrix of a batch
        for axis in self._axes:
            self.mine = self.mine * grid.size(axis) + grid.coordinate(axis)

    def to_full(self, matrices: Sequence[Sequence[Tensor]], name: str = "") -> Tensor | None:
        """The full matrix assigned to this rank, given this rank's shards of up to ``ranks`` matrices."""
        table = torch.zeros(self.ranks, sum(self._lengths), dtype=self._dtype, device=self._grid.device)
        for row, shards in zip(table, matrices, strict=False):
            for slot, shard in zip(row.split(self._lengths), shards, strict=True):
                slot[: shard.numel()].view(shard.shape).copy_(shard)
        table = self._exchange(table, name)
        if self.mine >= len(matrices):
            return None
        full = table.new_empty(self._layouts[0].hf_shape)
        for slot, place in self._slots(table, full):
            place.copy_(slot)
        return full

    def to_shards(self, full: Tensor | None, count: int, name: str = "") -> list[list[Tensor]]:
        """This rank's shards of the ``count`` matrices of a batch; ``full`` is the matrix assigned to this rank."""
        table = torch.zeros(self.ranks, sum(self._lengths), dtype=self._dtype, device=self._grid.device)
        if full is not None:
            for slot, place in self._slots(table, full):
                slot.copy_(place)
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

    def _slots(self, table: Tensor, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each shard of one matrix: its views of the table and of the full matrix."""
        positions = itertools.product(*(range(size) for size in self._table_shape))
        for row, coordinates in zip(table, positions, strict=True):
            rank: dict[Axis, int] = {"data": 0, "z": 0, "y": 0, "x": 0}
            rank.update(zip(self._axes, coordinates, strict=True))
            for slot, layout in zip(row.split(self._lengths), self._layouts, strict=True):
                index = layout.shard(self._grid, rank)
                shape = _shape(index)
                yield slot[: math.prod(shape)].view(shape), layout.of(full, index)


def _shape(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(piece.stop - piece.start for piece in index)
