"""One streamed weight: the shard that a rank stores, the block that it computes with, and the gradient of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

# There is no public name for sharding over an outer axis a dim that inner axes shard as well (torch 2.13.0).
from torch.distributed.tensor.placement_types import _StridedShard

from fourfold.errors import UnsupportedError
from fourfold.hf.parameter_layout import chunk, sharded_dim
from fourfold.mesh.axes import AXES, Axis
from fourfold.mesh.collectives import Pending
from fourfold.mesh.grid import Grid


class StreamedWeight:
    """One parameter: the shard that this rank stores, and the gathered block, whose memory is allocated and freed."""

    def __init__(
        self,
        name: str,
        holders: list[tuple[nn.Module, str]],
        block_index: int,
        block_shape: torch.Size,
        dim: int,
        stored: torch.dtype,
        grid: Grid,
        dtype: torch.dtype,
        bundle_bytes: int,
        is_owned: bool = False,
    ) -> None:
        """``is_owned``: the block is the shard, of which no other z rank computes with a part."""
        self.name, self.holders, self.block_index = name, holders, block_index
        # ``dim`` is sharded: the first in memory, so that shards are gathered into the block one after another. Its entries are the rows.
        self._dim, self._dtype = dim, dtype
        self.z = 1 if is_owned else grid.z  # the ranks that have its shards
        self._shape = torch.Size((*block_shape[dim : dim + 1], *block_shape[:dim], *block_shape[dim + 1 :]))
        self._collectives = grid.collectives
        rows = self._shape[0] if block_shape else 1
        self.row_numel = math.prod(self._shape[1:])
        self.padded_rows_per_rank = -(-rows // self.z)
        element_bytes = torch.empty((), dtype=dtype).element_size()
        # Includes padding, if z does not divide the rows.
        self.memory_bytes = self.padded_rows_per_rank * self.z * self.row_numel * element_bytes
        # Those share a buffer of one dtype, and a packed weight is bytes.
        is_bytes = dtype == torch.uint8
        self.is_small = math.prod(block_shape) * element_bytes <= bundle_bytes and not (is_bytes or is_owned)
        # Unsharded and in the dtype of the computation: the shard is the block.
        self.is_alias = self.z == 1 and dtype == stored
        # Called when the gradient of a backward is complete.
        self.on_gradient: Callable[[StreamedWeight], None]
        # The axes over which its gradient is summed, known when it is read: all that were given, and those with several ranks.
        self.read_with: tuple[Axis, ...] | None = None
        self.sum_over: tuple[Axis, ...] | None = None
        self.pending: Pending | None = None
        # Since it was gathered: the number of half-batches that its module has computed, and whether other modules read it.
        self.passes = 0
        self.is_read_elsewhere = False
        self.backward_passes = 0  # half-batches whose backward has begun to read it
        # Forward has computed its gradient with its output, so that backward does not read it.
        self.gradient_is_known = False
        self._block: Tensor | None = None
        self._memory: int | None = None  # the storage that the block is an alias of
        self._flat: Tensor | None = None
        self._hooked = False
        self._gathered = False
        self._accumulated: Tensor | None = None
        self._held: Tensor | None = None

    @property
    def parameter(self) -> nn.Parameter:
        module, key = self.holders[0]
        return cast(nn.Parameter, module._parameters[key])

    @property
    def shard(self) -> Tensor:
        # `to_local()` would put a node into the graph; FSDP2 reads the same attribute (torch 2.13.0).
        return cast(DTensor, self.parameter)._local_tensor.detach()

    def set_sum_over(self, axes: tuple[Axis, ...]) -> None:
        """Set the axes over which the gradient is summed."""
        found = tuple(axis for axis in AXES if axis in axes and self._collectives.size(axis) > 1)
        if self.sum_over is not None and found != self.sum_over:
            raise UnsupportedError(
                f"{self.name} is used twice, with gradients to be summed over {self.sum_over} and over {found}; untie it, or "
                "use weights='fsdp2'"
            )
        self.sum_over, self.read_with = found, axes

    # -- the block's memory -------------------------------------------------------------------------------------------

    @property
    def is_released(self) -> bool:
        return not self._gathered and self.pending is None

    @property
    def is_in_flight(self) -> bool:
        return self.pending is not None

    def gather_input(self) -> Tensor:
        """The shard in the dtype of the computation, padded to the number of rows of the first rank."""
        return self.pad_rows(self.rows_first(self.shard.to(self._dtype)), self.padded_rows_per_rank)

    def rows_first(self, tensor: Tensor) -> Tensor:
        """The block, a shard, or the gradient of one, with the dim that is sharded as the first."""
        return tensor.movedim(self._dim, 0) if self._dim else tensor

    def pad_rows(self, tensor: Tensor, rows: int | None = None) -> Tensor:
        rows = self.padded_rows_per_rank * self.z if rows is None else rows
        tensor = tensor.contiguous()
        if tensor.shape[0] == rows:
            return tensor
        padded = tensor.new_zeros(rows, *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        return padded

    def allocate(self) -> Tensor:
        """Allocate the block; returns its memory as a flat tensor that autograd does not track."""
        numel = self.padded_rows_per_rank * self.z * self.row_numel
        if self._flat is None:
            with torch.inference_mode(False):  # these tensors are kept, and training uses them too
                self._flat = torch.empty(numel, dtype=self._dtype, device=self.shard.device)
                # The padding is at the end of the buffer, after the block.
                rows = self._flat[: math.prod(self._shape)].view(self._shape)
                self._block = (rows.movedim(0, self._dim) if self._dim else rows).detach()
        else:
            self._flat.untyped_storage().resize_(numel * self._flat.element_size())
        self._gathered = True
        # Not `detach()`, which shares the version counter: to autograd, gathering does not change the block.
        return self._flat.data

    def arrive(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def release(self) -> None:
        self.arrive()
        if self._flat is not None and self._gathered:
            self._flat.untyped_storage().resize_(0)
        self._gathered = False
        self.passes, self.is_read_elsewhere, self.backward_passes = 0, False, 0

    def block(self) -> Tensor:
        """The tensor that forward reads: a leaf, whose gradient `on_gradient` handles."""
        parameter = self.parameter
        if self.is_alias:
            local = cast(DTensor, parameter)._local_tensor
            memory = local.untyped_storage()._cdata  # a fake tensor has a storage, but no address
            if memory != self._memory:  # the first read, or the parameter has other memory since
                self._memory, self._block, self._hooked = memory, local.detach(), False
        assert self._block is not None
        requires_grad = parameter.requires_grad
        if self._block.requires_grad != requires_grad:
            self._block.requires_grad_(requires_grad)
        if requires_grad and not self._hooked:
            self._block.register_post_accumulate_grad_hook(lambda _: self.on_gradient(self))
            self._hooked = True
        return self._block

    # -- its gradient -------------------------------------------------------------------------------------------------

    def pop_gradient(self, *, keep: bool) -> Tensor | None:
        """The gradient accumulated since the last one was sent, in fp32; with ``keep`` it is only accumulated."""
        assert self._block is not None
        gradient = self._block.grad
        self._block.grad = None
        if gradient is None:  # nothing of this backward depends on it
            gradient = self._accumulated
        else:
            if gradient.dtype != torch.float32:
                gradient = gradient.float()
            if self._accumulated is not None:
                gradient = self._accumulated.add_(gradient)
        self._accumulated = gradient if keep else None
        return None if keep else gradient

    def hold(self, shard_gradient: Tensor) -> None:
        """Keep this rank's part of the gradient of a micro-batch, until that of the last one is reduced over data."""
        self._held = shard_gradient if self._held is None else self._held.add_(shard_gradient)

    def pop_held(self) -> Tensor | None:
        held, self._held = self._held, None
        return held

    def set_gradient(self, shard_gradient: Tensor) -> None:
        """Add the gradient of this rank's shard, the rows first, to the parameter's."""
        parameter = cast(DTensor, self.parameter)
        local, shape = shard_gradient, parameter._local_tensor.shape
        if self._dim:  # z divides it: there is no padding
            local = local.view(-1, *self._shape[1:]).movedim(0, self._dim).contiguous()
        if local.shape != shape:
            local = local.view(-1)[: shape.numel()].view(shape)
        if parameter.grad is not None:
            cast(DTensor, parameter.grad)._local_tensor.add_(local)
            return
        # The constructor does not check the placements, as `from_local` would in every step.
        parameter.grad = DTensor(local, parameter._spec, requires_grad=False)


def shard_parameters(
    model: nn.Module,
    grid: Grid,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    bundle_bytes: int,
    owners: Collection[nn.Module] = (),
    *,
    only_owned: bool = False,
) -> list[StreamedWeight]:
    """Shard every parameter over z, in place, or those of ``owners`` alone; a tied parameter is one weight with several holders.

    ``owners`` compute with their shards.
    """
    block_of = {module: i for i, block in enumerate(blocks) for module in block.modules()}
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and (module in owners or not only_owned):
                holders.setdefault(parameter, []).append((module, key))
                names.setdefault(parameter, f"{name}.{key}" if name else key)
    weights = []
    for parameter, held_by in holders.items():
        block = cast(DTensor, parameter)._local_tensor.detach()
        if block.ndim == 0 and grid.z > 1:
            raise UnsupportedError(
                f"{names[parameter]} is a scalar, which cannot be sharded over z={grid.z}; use z=1, or make it a "
                "tensor of one element"
            )
        dim = sharded_dim(parameter, grid)
        sharded = _shard_over_z(cast(DTensor, parameter), block, dim, grid)
        for module, key in held_by:
            module._parameters[key] = sharded
        index = block_of.get(held_by[0][0], -1)
        used = dtype if block.is_floating_point() else block.dtype
        is_owned = held_by[0][0] in owners
        shape = cast(DTensor, sharded)._local_tensor.shape if is_owned else block.shape
        weights.append(
            StreamedWeight(
                names[parameter], held_by, index, shape, dim, block.dtype, grid, used, bundle_bytes, is_owned
            )
        )
    return weights


def _shard_over_z(parameter: DTensor, block: Tensor, dim: int, grid: Grid) -> nn.Parameter:
    if grid.z == 1:
        shard = block
    else:
        part = chunk(block.shape[dim], grid.z, grid.coordinate("z"))
        # A copy, so that the block can be freed.
        shard = block.narrow(dim, part.start, part.stop - part.start).clone(
            memory_format=torch.contiguous_format
        )
    placements: list[Placement] = list(parameter.placements)
    inner: tuple[Axis, ...] = ("y", "x")
    inner_ranks = math.prod(
        grid.size(a) for a in inner if isinstance(p := placements[AXES.index(a)], Shard) and p.dim == dim
    )
    if block.ndim > 0:
        placements[AXES.index("z")] = (
            Shard(dim) if inner_ranks == 1 else _StridedShard(dim, split_factor=inner_ranks)
        )
    local = DTensor.from_local(
        shard, grid.mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def largest_block_bytes(weights: Sequence[StreamedWeight]) -> int:
    """The bytes of the fp32 gradients of the largest transformer block."""
    totals: dict[int, int] = {}
    for weight in weights:
        if weight.block_index >= 0:
            totals[weight.block_index] = totals.get(weight.block_index, 0) + math.prod(weight._shape) * 4
    return max(totals.values(), default=0)
