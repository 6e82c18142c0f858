"""Differentiable sums over an axis: a replicated tensor carries the complete gradient on each of its replicas.

Each function is complete when it returns, except where something useful can run before the gradient of an input is
waited for: the other half of a split batch (`parallel/batch_split.py`), or the start of a reduce-scatter of streamed weights.
There the gradient is returned in flight, and the node that `await_gradient` puts in front of the operation waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Pending, Purpose, by_number
from fourfold.mesh.kept import computed_once
from fourfold.mesh.operators import traced

Gradients = Sequence[Tensor | None]


def put_in_flight(
    gradient: Tensor, pending: Pending, of_weights: Callable[[], Gradients] | None = None
) -> Tensor:
    """Return ``gradient`` from a backward before ``pending`` is complete, and the gradients of weights before they are computed.

    `await_gradient` stands in front.
    """
    gradient._in_flight = pending, of_weights  # type: ignore[attr-defined]
    return gradient


class _AwaitGradient(torch.autograd.Function):
    """Precedes an operation, so follows it in backward: there the gradients of its input and of its weights have to be complete."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_input, *of_weights = gradients
        in_flight = None if of_input is None else of_input.__dict__.pop("_in_flight", None)
        if in_flight is not None:
            pending, compute = in_flight
            of_weights = of_weights if compute is None else compute()
            pending.wait()
        return of_input, *of_weights


def await_gradient(
    input: Tensor, collectives: Collectives, weights: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """``input`` and ``weights`` for an operation whose backward returns the gradient of the first in flight."""
    tensors = cast(tuple[Tensor, ...], _AwaitGradient.apply(input, *weights))  # type: ignore[no-untyped-call]
    if collectives.interleaving is not None:
        collectives.interleaving.begin_section()
    return tensors


class _Sum(torch.autograd.Function):
    """Sums over an axis, in forward, in backward, or in both; the other direction is the identity."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        collectives: Collectives,
        axis: Axis,
        purpose: Purpose,
        module: str,
        directions: tuple[bool, bool],
        deferred: bool,
    ) -> Tensor:
        in_forward, ctx.in_backward = directions
        ctx.collectives, ctx.axis, ctx.purpose = collectives, axis, purpose
        ctx.module, ctx.deferred = module, deferred
        if not in_forward:
            return tensor.view_as(tensor)

        def total() -> Tensor:
            parts = tensor.clone(memory_format=torch.contiguous_format)
            pending = collectives.all_reduce(parts, axis, purpose, module=module)
            collectives.wait(pending, in_turns=_is_large(purpose))
            return parts

        return computed_once(tensor.device, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        gradient = total = gradients[0]
        if ctx.in_backward:
            # Gradients of parameters are reduced in fp32, whatever precision computes them.
            dtype = torch.float32 if ctx.purpose == "replica" else gradient.dtype
            total = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
            pending = ctx.collectives.all_reduce(total, ctx.axis, ctx.purpose, module=ctx.module)
            if ctx.deferred:
                total = put_in_flight(total, pending)
            else:
                pending.wait()
                total = total.to(gradient.dtype)
        return total, None, None, None, None, None, None


def _is_large(purpose: Purpose) -> bool:
    """Is it worth a switch of half-batches? Statistics of a norm and gradients of vectors are a few bytes."""
    return purpose not in ("norm", "replica")


def _sum(
    tensor: Tensor,
    collectives: Collectives,
    axis: Axis | None,
    purpose: Purpose,
    module: str,
    in_forward: bool,
    in_backward: bool,
) -> Tensor:
    if axis is None or collectives.size(axis) == 1:
        return tensor
    if torch.compiler.is_compiling():
        # One operator for Dynamo, which autograd takes apart.
        return cast(
            Tensor,
            torch.ops.fourfold.sum(tensor, collectives.number, axis, purpose, in_forward, in_backward),
        )
    deferred = in_backward and collectives.interleaving is not None and _is_large(purpose)
    if deferred:
        (tensor,) = await_gradient(tensor, collectives)
    arguments = (tensor, collectives, axis, purpose, module, (in_forward, in_backward), deferred)
    return cast(Tensor, _Sum.apply(*arguments))  # type: ignore[no-untyped-call]


def sum_forward(
    tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose, module: str = ""
) -> Tensor:
    """Partial sums become one replicated tensor; its gradient is complete already, on each rank."""
    return _sum(tensor, collectives, axis, purpose, module, True, False)


def sum_backward(
    tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose, module: str = ""
) -> Tensor:
    """A replicated tensor is used by sharded work: the ranks' partial gradients are summed."""
    return _sum(tensor, collectives, axis, purpose, module, False, True)


def sum_both(
    tensor: Tensor, collectives: Collectives, axis: Axis | None, purpose: Purpose, module: str = ""
) -> Tensor:
    """A sum over sharded features by which sharded features are then scaled, as in a norm."""
    return _sum(tensor, collectives, axis, purpose, module, True, True)


def _traced_sum(
    tensor: Tensor, collectives: int, axis: Axis, purpose: Purpose, in_forward: bool, in_backward: bool
) -> Tensor:
    of = traced(by_number[collectives])
    return cast(
        Tensor,
        _Sum.apply(tensor, of, axis, purpose, "", (in_forward, in_backward), False),  # type: ignore[no-untyped-call]
    )


_library = torch.library.Library("fourfold", "FRAGMENT")
_library.define(
    "sum(Tensor tensor, int collectives, str axis, str purpose, bool in_forward, bool in_backward) -> Tensor"
)
_library.impl("sum", _traced_sum, "CompositeImplicitAutograd")
