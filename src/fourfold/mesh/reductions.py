"""Differentiable sums over an axis: a replicated tensor carries the whole gradient on each of its replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Pending, Purpose


@dataclass
class InFlight:
    """The collectives of one operation: each is waited for by the first who reads its result."""

    outputs: list[Pending] = field(default_factory=list)
    input_gradient: Pending | None = None


@dataclass(frozen=True)
class GradientAxes:
    """Of a parameter that several ranks use: the axes over which each of them has a part of its gradient.

    Over those of ``whole`` each has all of it, in this batch, but a part in batches of another shape.
    """

    parts: tuple[Axis, ...] = ()
    whole: tuple[Axis, ...] = ()


NO_PARTS = GradientAxes()


class _GradientArrived(torch.autograd.Function):
    """Stands before an operation, so after it in backward: there the gradient of its input has to be complete.

    In between autograd does what else is ready: it hands on the gradients of weights, whose own communication so begins
    before this wait, and it works on the other half of an interleaved batch.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, flight: InFlight) -> Tensor:
        ctx.flight = flight
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.flight.input_gradient is not None:
            ctx.flight.input_gradient.wait()
            ctx.flight.input_gradient = None
        return gradients[0], None


def await_gradient(
    input: Tensor, flight: InFlight, collectives: Collectives, *, takes_turns: bool = True
) -> Tensor:
    """``input`` for an operation whose backward leaves the reduction of its gradient in ``flight``."""
    input = cast(Tensor, _GradientArrived.apply(input, flight))  # type: ignore[no-untyped-call]
    if takes_turns:
        collectives.turns.begin_section()
    return input


class _SumForward(torch.autograd.Function):
    """Partial sums become one replicated tensor; its gradient is whole already, on each rank."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose, module: str
    ) -> Tensor:
        total = tensor.clone()
        pending = collectives.all_reduce(total, axis, purpose, module=module)
        if _takes_turns(purpose):
            collectives.turns.pass_on()
        pending.wait()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradients[0], None, None, None, None


class _SumBackward(torch.autograd.Function):
    """A replicated tensor is used by sharded work: the ranks' partial gradients are summed."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        flight: InFlight,
        collectives: Collectives,
        axis: Axis | None,
        purpose: Purpose,
        module: str,
    ) -> Tensor:
        ctx.flight, ctx.collectives, ctx.axis = flight, collectives, axis
        ctx.purpose, ctx.module = purpose, module
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        gradient = gradients[0]
        # Gradients of parameters are reduced in fp32, whatever the work is done in.
        dtype = torch.float32 if ctx.purpose == "replica" else gradient.dtype
        total = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
        pending = ctx.collectives.all_reduce(total, ctx.axis, ctx.purpose, module=ctx.module)
        if dtype != gradient.dtype:
            pending.wait()
            total = total.to(gradient.dtype)
        else:
            ctx.flight.input_gradient = pending
        return total, None, None, None, None, None


def _takes_turns(purpose: Purpose) -> bool:
    """A norm's statistics, and gradients of vectors, are so few bytes that waiting for them is cheaper than a change of lanes."""
    return purpose not in ("norm", "replica")


def sum_forward(
    tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose, module: str = ""
) -> Tensor:
    if axis is None or collectives.size(axis) == 1:
        return tensor
    return cast(Tensor, _SumForward.apply(tensor, collectives, axis, purpose, module))  # type: ignore[no-untyped-call]


def sum_backward(
    tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose, module: str = ""
) -> Tensor:
    if axis is None or collectives.size(axis) == 1:
        return tensor
    flight = InFlight()
    tensor = await_gradient(tensor, flight, collectives, takes_turns=_takes_turns(purpose))
    arguments = (tensor, flight, collectives, axis, purpose, module)
    return cast(Tensor, _SumBackward.apply(*arguments))  # type: ignore[no-untyped-call]


def sum_both(
    tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose, module: str = ""
) -> Tensor:
    """A sum over sharded features that sharded features are then divided by, as in a norm."""
    return sum_forward(
        sum_backward(tensor, collectives, axis, purpose, module), collectives, axis, purpose, module
    )
