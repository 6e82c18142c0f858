"""A rank's piece of a tensor, in the form that the planners of `torch.distributed.checkpoint` take.

The planners decide who writes what is held twice, and who reads what from where; nothing here depends on the grid.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor of shape ``whole``, from ``offset`` on; ``local`` is a plain tensor and may be empty."""

    local: Tensor
    offset: tuple[int, ...]
    whole: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Piece:
        """What this rank holds of a DTensor; any other tensor is held whole."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return Piece(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
        local = tensor.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        assert tuple(shape) == tuple(local.shape)
        return Piece(local, tuple(offset), tuple(tensor.shape))

    def with_local(self, local: Tensor) -> Piece:
        """The same rectangle of another tensor of that shape."""
        assert local.shape == self.local.shape
        return Piece(local.detach(), self.offset, self.whole)

    def staged(self) -> Piece:
        """A copy in the memory of the host, which training does not change."""
        return self.with_local(self.local.detach().to("cpu", copy=True).contiguous())

    # -- what DCP's planners ask for ----------------------------------------------------------------------------------

    def size(self) -> torch.Size:
        return torch.Size(self.whole)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        if not self.local.numel() and math.prod(self.whole):
            return []  # its offset could be that of the next rank's rows, and DCP knows pieces by their offset
        data = TensorWriteData(self._chunk(), TensorProperties(dtype=self.local.dtype), self.size())
        return [WriteItem(MetadataIndex(name, self.offset), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.local.numel() else []


class SavePlanner(DefaultSavePlanner):
    """DCP's own, for pieces by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return cast(Piece, self.state_dict[index.fqn]).local


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
        for name, piece in self.state_dict.items():
            stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])
            if stored.properties.dtype != piece.local.dtype:
                raise ValueError(
                    f"{name} is {stored.properties.dtype} in the checkpoint, but {piece.local.dtype} here; build it in the "
                    "dtype of the checkpoint"
                )
            if planned[name] != piece.local.numel():
                raise ValueError(
                    f"the checkpoint has {planned[name]} of the {piece.local.numel()} numbers that this rank needs of {name}"
                )
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return cast(Piece, self.state_dict[index.fqn]).local
