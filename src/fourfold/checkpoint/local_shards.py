"""A rank's shards of Hugging Face tensors, in the form that the planners of `torch.distributed.checkpoint` take.

Shards are those of Hugging Face tensors, because the parameters that a packed projection is split into depend on the grid.
The planners decide which rank writes a replicated shard, and which ranges each rank reads.
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

# There is no public name for the offset of a shard in its tensor (torch 2.13.0).
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fourfold.hf.parameter_layout import ParameterLayout


@dataclass(frozen=True)
class LocalShard:
    """A rectangle of a tensor of shape ``global_shape`` at ``offset``; ``local`` is a plain tensor and may be empty."""

    local: Tensor
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    @staticmethod
    def of(
        tensor: Tensor, layout: ParameterLayout | None = None, values: Tensor | None = None
    ) -> list[LocalShard]:
        """This rank's shard of a DTensor, or all of any other tensor; ``layout`` says which parts of which tensor it is.

        ``values``: other values, such as a moment, of the same shard.
        """
        tensor = tensor.detach()
        local, offset = tensor, (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            shape, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            assert tuple(shape) == tuple(local.shape)
        if values is not None:
            assert values.shape == local.shape
            local = values.detach()
        if layout is None:
            return [LocalShard(local, tuple(offset), tuple(tensor.shape))]
        assert layout.shape == tuple(tensor.shape)
        index = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
        return [
            LocalShard(local[part], tuple(piece.start for piece in place), layout.hf_shape)
            for part, place in layout.boxes(index)
        ]

    def with_local(self, local: Tensor) -> LocalShard:
        """The same rectangle, with the values of another tensor."""
        assert local.shape == self.local.shape
        return LocalShard(local.detach(), self.offset, self.global_shape)


class LocalShards:
    """A rank's shards of one tensor: several for a packed projection, one for each of its parts."""

    def __init__(self, shards: Iterable[LocalShard] = ()) -> None:
        self.shards: list[LocalShard] = []
        self.global_shape: tuple[int, ...] = ()
        self.add(*shards)

    def add(self, *shards: LocalShard) -> None:
        for shard in shards:
            assert not self.shards or self.global_shape == shard.global_shape
            self.global_shape = shard.global_shape
            # DCP identifies shards by their offset, and an empty shard may have the offset of another rank's shard.
            if shard.local.numel():
                self.shards.append(shard)

    def staged(self) -> LocalShards:
        """Copies in host memory, which training does not change. From a GPU they are complete after a synchronisation."""
        held = LocalShards(p.with_local(_host_copy(p.local)) for p in self.shards)
        held.global_shape = self.global_shape
        return held

    # -- the protocol of DCP's planners ----------------------------------------------------------------------------------

    def size(self) -> torch.Size:
        return torch.Size(self.global_shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        # The parts of a packed projection have the same step count: one of them is enough.
        first = {shard.offset: shard for shard in reversed(self.shards)}
        return [
            WriteItem(
                MetadataIndex(name, shard.offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(shard), TensorProperties(dtype=shard.local.dtype), self.size()
                ),
            )
            for shard in first.values()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(shard) for shard in self.shards]


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    # Pinned, so that the copies of all tensors follow one another without the host. PyTorch keeps the memory for the next save.
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return held.copy_(tensor, non_blocking=True)


# What both planners take: `LocalShards` by name are flat already.
FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def _chunk(shard: LocalShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.offset), shard.local.shape)


class SavePlanner(DefaultSavePlanner):
    """DCP's default planner, for `LocalShards` by name."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        held = cast(LocalShards, self.state_dict[index.fqn])
        return next(shard.local for shard in held.shards if shard.offset == index.offset)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, for `LocalShards` by name; a missing element or another dtype is an error."""

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
            for shard in held.shards:
                if stored.properties.dtype != shard.local.dtype:
                    raise ValueError(
                        f"{name} is {stored.properties.dtype} in the checkpoint, but {shard.local.dtype} here; build the model "
                        "and its optimizer in the dtypes of the checkpoint (in a run config: optimizer.name)"
                    )
            needed = sum(shard.local.numel() for shard in held.shards)
            if planned[name] != needed:
                raise ValueError(
                    f"the checkpoint has {planned[name]} of the {needed} elements that this rank needs of {name}"
                )
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None  # its position in the list of chunks
        return cast(LocalShards, self.state_dict[index.fqn]).shards[index.index].local
