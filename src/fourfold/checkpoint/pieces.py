"""A rank's piece of a tensor, in the form that the planners of `torch.distributed.checkpoint` take.

Pieces are those of the Hugging Face tensors: which parameters a packed projection is cut into depends on the grid.
The planners decide who writes what several ranks hold, and who reads what from where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

# There is no public name for where a shard lies in its tensor (torch 2.13.0).
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fourfold.hf.parameter_layout import ParameterLayout


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor of shape ``whole``, from ``offset`` on; ``local`` is a plain tensor and may be empty."""

    local: Tensor
    offset: tuple[int, ...]
    whole: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor, layout: ParameterLayout | None = None) -> Piece:
        """What this rank holds of a DTensor, of any other tensor all; ``layout``: which part of what tensor that is."""
        tensor = tensor.detach()
        local, offset = tensor, (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            shape, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            assert tuple(shape) == tuple(local.shape)
        if layout is None:
            return Piece(local, tuple(offset), tuple(tensor.shape))
        assert layout.shape == tuple(tensor.shape)
        return Piece(local, tuple(s + o for s, o in zip(layout.start, offset, strict=True)), layout.hf_shape)

    def with_local(self, local: Tensor) -> Piece:
        """The same rectangle of another tensor of that shape."""
        assert local.shape == self.local.shape
        return Piece(local.detach(), self.offset, self.whole)


class Held:
    """All that a rank holds of one tensor: of a packed projection that is a piece for each of its parts."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: list[Piece] = []
        self.whole: tuple[int, ...] = ()
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        assert not self.pieces or self.whole == piece.whole
        self.whole = piece.whole
        # An empty piece may begin where another rank's begins, and DCP knows pieces by where they begin.
        if piece.local.numel():
            self.pieces.append(piece)

    def staged(self) -> Held:
        """Copies in the memory of the host, which training does not change."""
        held = Held(p.with_local(p.local.to("cpu", copy=True).contiguous()) for p in self.pieces)
        held.whole = self.whole
        return held

    # -- what DCP's planners ask for ----------------------------------------------------------------------------------

    def size(self) -> torch.Size:
        return torch.Size(self.whole)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        # The parts of a packed projection count their steps alike: one of the counts is enough.
        first = {piece.offset: piece for piece in reversed(self.pieces)}
        return [
            WriteItem(
                MetadataIndex(name, piece.offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(piece), TensorProperties(dtype=piece.local.dtype), self.size()
                ),
            )
            for piece in first.values()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self.pieces]


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), piece.local.shape)


class SavePlanner(DefaultSavePlanner):
    """DCP's own, for pieces by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        held = cast(Held, self.state_dict[index.fqn])
        return next(piece.local for piece in held.pieces if piece.offset == index.offset)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own, for pieces by name; a number that no file has is an error, and so is another dtype."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plan = super().create_local_plan()
        planned = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            planned[item.dest_index.fqn] += math.prod(item.lengths)
        for name, held in self.state_dict.items():
            stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])
            for piece in held.pieces:
                if stored.properties.dtype != piece.local.dtype:
                    raise ValueError(
                        f"{name} is {stored.properties.dtype} in the checkpoint, but {piece.local.dtype} here; build it in "
                        "the dtype of the checkpoint"
                    )
            needed = sum(piece.local.numel() for piece in held.pieces)
            if planned[name] != needed:
                raise ValueError(
                    f"the checkpoint has {planned[name]} of the {needed} numbers that this rank needs of {name}"
                )
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None  # its place in the list of chunks
        return cast(Held, self.state_dict[index.fqn]).pieces[index.index].local
