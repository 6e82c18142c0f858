"""A sum over ranks as an operator of PyTorch, for blocks that are compiled: Dynamo puts it into the graph as it is."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Purpose, by_number


@torch.library.custom_op("fourfold::all_reduce", mutates_args=())
def all_reduce(tensor: Tensor, collectives: int, axis: str, purpose: str) -> Tensor:
    # Without the name of a module, by which blocks that are alike would differ.
    total = tensor.clone(memory_format=torch.contiguous_format)
    by_number[collectives].all_reduce(total, cast(Axis, axis), cast(Purpose, purpose)).wait()
    return total


@all_reduce.register_fake
def _(tensor: Tensor, collectives: int, axis: str, purpose: str) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class TracedSum(torch.autograd.Function):
    """As in `reductions.py`, complete when it returns."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        collectives: int,
        axis: str,
        purpose: str,
        in_forward: bool,
        in_backward: bool,
    ) -> Tensor:
        ctx.arguments, ctx.in_backward = (collectives, axis, purpose), in_backward
        return all_reduce(tensor, *ctx.arguments) if in_forward else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        gradient = gradients[0]
        if ctx.in_backward:
            wide = gradient.float() if ctx.arguments[2] == "replica" else gradient
            gradient = all_reduce(wide, *ctx.arguments).to(gradient.dtype)
        return gradient, None, None, None, None, None
