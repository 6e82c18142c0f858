"""Every collective there is: asynchronous, by axis name, counted.

The package calls `torch.distributed` here and nowhere else, so that the account of calls and bytes is complete.
Sizes are those of a ring, which is what every large-message algorithm sends per rank:

    all-reduce      2 (G-1)/G x payload        payload: the tensor
    all-gather        (G-1)/G x payload        payload: the gathered result
    reduce-scatter    (G-1)/G x payload        payload: the tensor before it is scattered
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# The interfaces of `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` (seen in torch 2.13.0).
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fourfold.grid import Axis

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
# What a collective is for. Activations and weights are the algorithm's traffic; the rest is small and listed apart.
Purpose = Literal["activation", "weight", "gradient", "norm", "loss", "clip", "replica", "logits", "check"]


@dataclass(frozen=True)
class Entry:
    """One line of the account."""

    axis: Axis
    kind: Kind
    purpose: Purpose
    ranks: int
    calls: int = 0
    payload_bytes: int = 0

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent, as a ring sends them."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (self.ranks - 1) * self.payload_bytes / self.ranks


class Pending:
    """A collective in flight. The tensors it works on are kept alive here until it was waited for."""

    def __init__(self, work: dist.Work | None, *tensors: Tensor) -> None:
        self._work = work
        self._tensors: tuple[Tensor, ...] | None = tensors

    def wait(self) -> None:
        if self._work is not None:
            # On CUDA this makes the current stream wait, not the host: c10d's contract for async work.
            self._work.wait()
        self._work = None
        self._tensors = None


_DONE = Pending(None)


class Collectives:
    """The collectives of one grid and their account."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._account: dict[tuple[Axis, Kind, Purpose], Entry] = {}

    def size(self, axis: Axis) -> int:
        return self._mesh.size(cast(tuple[str, ...], self._mesh.mesh_dim_names).index(axis))

    # -- the account ----------------------------------------------------------------------------------------------

    def account(self) -> list[Entry]:
        """Calls and bytes since the last reset, by axis, kind and purpose."""
        return [self._account[key] for key in sorted(self._account)]

    def reset(self) -> None:
        self._account.clear()

    @contextmanager
    def counting(self) -> Iterator[list[Entry]]:
        """The account of what happens inside, alone.

        Example:
            >>> with grid.collectives.counting() as entries:
            ...     model(input_ids=ids, labels=ids).loss.backward()
            >>> sum(entry.bytes_sent for entry in entries)  # one rank sends nothing
            0
        """
        outer, self._account = self._account, {}
        entries: list[Entry] = []
        try:
            yield entries
        finally:
            entries.extend(self.account())
            inner, self._account = self._account, outer
            for entry in inner.values():
                self._add(entry)

    def _add(self, more: Entry) -> None:
        key = (more.axis, more.kind, more.purpose)
        had = self._account.get(key)
        if had is not None:
            more = Entry(*key, more.ranks, had.calls + more.calls, had.payload_bytes + more.payload_bytes)
        self._account[key] = more

    def _count(self, axis: Axis, kind: Kind, purpose: Purpose, payload: Tensor) -> None:
        self._add(Entry(axis, kind, purpose, self.size(axis), 1, payload.numel() * payload.element_size()))

    # -- the collectives: in place or into a given tensor, in flight until `wait` ----------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        axis: Axis | None,
        purpose: Purpose,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> Pending:
        """Reduce ``tensor`` in place over an axis; nothing happens on no axis or one of a single rank."""
        if axis is None or self.size(axis) == 1:
            return _DONE
        self._count(axis, "all_reduce", purpose, tensor)
        return Pending(dist.all_reduce(tensor, op, self._mesh.get_group(axis), async_op=True), tensor)

    def all_gather(self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose) -> Pending:
        if self.size(axis) == 1:
            output.view(-1).copy_(tensor.view(-1))
            return _DONE
        self._count(axis, "all_gather", purpose, output)
        group = self._mesh.get_group(axis)
        # Flat, because Gloo wants the output to be the inputs side by side along their first dim.
        work = dist.all_gather_single(output.view(-1), tensor.view(-1), group, async_op=True)
        return Pending(work, output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose) -> Pending:
        if self.size(axis) == 1:
            output.view(-1).copy_(tensor.view(-1))
            return _DONE
        self._count(axis, "reduce_scatter", purpose, tensor)
        group = self._mesh.get_group(axis)
        work = dist.reduce_scatter_single(
            output.view(-1), tensor.view(-1), dist.ReduceOp.SUM, group, async_op=True
        )
        return Pending(work, output, tensor)

    # -- FSDP2's collectives, led through the same account ----------------------------------------------------------

    def take_over(self, module: FSDPModule) -> None:
        """Let the collectives of a `fully_shard`ed module be counted here.

        Gradients are summed, not averaged: the loss is divided by the tokens of the global batch already. The data
        axis is reduced in FSDP2's hook behind the reduce-scatter, which is its documented place for that.
        """
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_CountedAllGather(self))
        module.set_custom_reduce_scatter(_CountedReduceScatter(self))
        if self.size("data") > 1:
            module.set_all_reduce_hook(self._reduce_over_data)

    def _reduce_over_data(self, gradient: Tensor) -> None:
        self.all_reduce(gradient, "data", "gradient").wait()
        if gradient.is_cuda:
            # Allocated in FSDP2's reduce-scatter stream, used in its all-reduce stream, where this hook runs. FSDP2 keeps
            # such a buffer from being reused too early for its own all-reduce alone; here this does.
            gradient.record_stream(torch.cuda.current_stream())


class _Allocate:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_Allocate, AllGather):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._collectives._count("z", "all_gather", "weight", output_tensor)
        work = dist.all_gather_single(output_tensor, input_tensor, group, async_op=async_op)
        return cast(dist.Work | None, work)


class _CountedReduceScatter(_Allocate, ReduceScatter):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._collectives._count("z", "reduce_scatter", "gradient", input_tensor)
        work = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=async_op)
        return cast(dist.Work | None, work)


# -- differentiable forms: a replicated tensor carries the whole gradient on each of its replicas --------------------


class _SumForward(torch.autograd.Function):
    """Partial sums become one replicated tensor; its gradient is whole already, on each rank."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose
    ) -> Tensor:
        total = tensor.clone()
        collectives.all_reduce(total, axis, purpose).wait()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0], None, None, None


class _SumBackward(torch.autograd.Function):
    """A replicated tensor is used by sharded work: the ranks' partial gradients are summed."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose
    ) -> Tensor:
        ctx.collectives, ctx.axis, ctx.purpose = collectives, axis, purpose
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Gradients of parameters are reduced in fp32, whatever the work is done in.
        dtype = torch.float32 if ctx.purpose == "replica" else gradients[0].dtype
        total = gradients[0].to(dtype, copy=True, memory_format=torch.contiguous_format)
        ctx.collectives.all_reduce(total, ctx.axis, ctx.purpose).wait()
        return total.to(gradients[0].dtype), None, None, None


def sum_forward(tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose) -> Tensor:
    if axis is None or collectives.size(axis) == 1:
        return tensor
    return cast(Tensor, _SumForward.apply(tensor, collectives, axis, purpose))  # type: ignore[no-untyped-call]


def sum_backward(tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose) -> Tensor:
    if axis is None or collectives.size(axis) == 1:
        return tensor
    return cast(Tensor, _SumBackward.apply(tensor, collectives, axis, purpose))  # type: ignore[no-untyped-call]


def sum_both(tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose) -> Tensor:
    """A sum over sharded features that sharded features are then divided by, as in a norm."""
    return sum_forward(sum_backward(tensor, collectives, axis, purpose), collectives, axis, purpose)
