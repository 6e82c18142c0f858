"""What ranks that repeat each other's work have in a sum over them: it counts once.

In the graph of a compiled block these are operators, which autograd takes apart.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class _ShareOfGradient(torch.autograd.Function):
    """In backward, of a gradient that all ranks have: this rank's hidden features of it on one x rank, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: int, parts: int, is_first: bool) -> Tensor:
        ctx.part, ctx.parts, ctx.is_first = part, parts, is_first
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        share = torch.zeros_like(gradients[0])
        if ctx.is_first:
            width = share.shape[-1] // ctx.parts
            own = slice(ctx.part * width, (ctx.part + 1) * width)
            share[..., own] = gradients[0][..., own]
        return share, None, None, None


class _OnceInSum(torch.autograd.Function):
    """What all ranks add to parts of a sum, and what counts once: its value on the first rank, zeros on the others.

    Its gradient is that of the sum, on all of them.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, is_first: bool) -> Tensor:
        return value.view_as(value) if is_first else torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def share_of_gradient(whole: Tensor, part: int, parts: int, is_first: bool) -> Tensor:
    if parts == 1 and is_first:
        return whole
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.ops.fourfold.share_of_gradient(whole, part, parts, is_first))
    return cast(Tensor, _ShareOfGradient.apply(whole, part, parts, is_first))  # type: ignore[no-untyped-call]


def once_in_sum(value: Tensor, is_first: bool) -> Tensor:
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.ops.fourfold.once_in_sum(value, is_first))
    return cast(Tensor, _OnceInSum.apply(value, is_first))  # type: ignore[no-untyped-call]


def _traced_share(whole: Tensor, part: int, parts: int, is_first: bool) -> Tensor:
    return cast(Tensor, _ShareOfGradient.apply(whole, part, parts, is_first))  # type: ignore[no-untyped-call]


def _traced_once(value: Tensor, is_first: bool) -> Tensor:
    return cast(Tensor, _OnceInSum.apply(value, is_first))  # type: ignore[no-untyped-call]


_library = torch.library.Library("fourfold", "FRAGMENT")
_library.define("share_of_gradient(Tensor whole, int part, int parts, bool is_first) -> Tensor")
_library.impl("share_of_gradient", _traced_share, "CompositeImplicitAutograd")
_library.define("once_in_sum(Tensor value, bool is_first) -> Tensor")
_library.impl("once_in_sum", _traced_once, "CompositeImplicitAutograd")
