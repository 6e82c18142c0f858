"""Differentiable gathers and scatters over an axis: parts of a tensor are gathered along a dim, parts of a sum scattered along it.

Each is the other in backward. In the graph of a compiled block they are operators, which autograd takes apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Purpose, by_number
from fourfold.mesh.grid import Grid
from fourfold.mesh.kept import computed_once
from fourfold.mesh.operators import traced


@dataclass(frozen=True)
class _Exchange:
    """Over which ranks, along which dim of the tensor, and for what."""

    collectives: Collectives
    axis: Axis
    dim: int
    purpose: Purpose
    name: str

    def all_gather(self, own: Tensor, *, in_forward: bool) -> Tensor:
        whole = own.new_empty(self.collectives.size(self.axis), *own.shape)
        pending = self.collectives.all_gather(
            whole, own.contiguous(), self.axis, self.purpose, module=self.name
        )
        self.collectives.wait(pending, in_turns=in_forward)
        return whole.movedim(0, self.dim).flatten(self.dim, self.dim + 1)

    def reduce_scatter(self, parts: Tensor, *, in_forward: bool) -> Tensor:
        by_rank: Tensor = parts.unflatten(self.dim, (self.collectives.size(self.axis), -1))
        by_rank = by_rank.movedim(self.dim, 0).contiguous()
        own = by_rank.new_empty(by_rank.shape[1:])
        pending = self.collectives.reduce_scatter(own, by_rank, self.axis, self.purpose, module=self.name)
        self.collectives.wait(pending, in_turns=in_forward)
        return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_gather(own, in_forward=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.reduce_scatter(gradients[0], in_forward=False), None


class _GatherForAll(torch.autograd.Function):
    """All ranks do the same with what is gathered, and have the same gradient: each takes its part of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: _Exchange, place: int) -> Tensor:
        ctx.exchange, ctx.place = exchange, place
        return computed_once(own.device, lambda: exchange.all_gather(own, in_forward=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        exchange: _Exchange = ctx.exchange
        parts = gradients[0].chunk(exchange.collectives.size(exchange.axis), exchange.dim)
        return parts[ctx.place].contiguous(), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return computed_once(parts.device, lambda: exchange.reduce_scatter(parts, in_forward=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.all_gather(gradients[0], in_forward=False), None


def gather(
    own: Tensor, collectives: Collectives, axis: Axis, dim: int, purpose: Purpose, name: str = ""
) -> Tensor:
    """All ranks' tensors side by side along ``dim``; in backward each has a part of the gradient, and they are summed."""
    if collectives.size(axis) == 1:
        return own
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.ops.fourfold.gather(own, collectives.number, axis, dim, purpose))
    exchange = _Exchange(collectives, axis, dim, purpose, name)
    return cast(Tensor, _Gather.apply(own, exchange))  # type: ignore[no-untyped-call]


def gather_for_all(own: Tensor, grid: Grid, axis: Axis, dim: int, purpose: Purpose, name: str = "") -> Tensor:
    """As `gather`, for work that all ranks do alike: its gradient is complete on each, and nothing is sent in backward."""
    collectives, place = grid.collectives, grid.coordinate(axis)
    if collectives.size(axis) == 1:
        return own
    if torch.compiler.is_compiling():
        number = collectives.number
        return cast(Tensor, torch.ops.fourfold.gather_for_all(own, number, axis, dim, purpose, place))
    exchange = _Exchange(collectives, axis, dim, purpose, name)
    return cast(Tensor, _GatherForAll.apply(own, exchange, place))  # type: ignore[no-untyped-call]


def scatter(
    parts: Tensor, collectives: Collectives, axis: Axis, dim: int, purpose: Purpose, name: str = ""
) -> Tensor:
    """Of the sum of the ranks' tensors this rank's part along ``dim``."""
    if collectives.size(axis) == 1:
        return parts
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.ops.fourfold.scatter(parts, collectives.number, axis, dim, purpose))
    exchange = _Exchange(collectives, axis, dim, purpose, name)
    return cast(Tensor, _Scatter.apply(parts, exchange))  # type: ignore[no-untyped-call]


def _in_graph(collectives: int, axis: Axis, dim: int, purpose: Purpose) -> _Exchange:
    return _Exchange(traced(by_number[collectives]), axis, dim, purpose, "")


def _traced_gather(own: Tensor, *sent: Any) -> Tensor:
    return cast(Tensor, _Gather.apply(own, _in_graph(*sent)))  # type: ignore[no-untyped-call]


def _traced_gather_for_all(own: Tensor, *sent: Any) -> Tensor:
    *sent_as, place = sent
    return cast(Tensor, _GatherForAll.apply(own, _in_graph(*sent_as), place))  # type: ignore[no-untyped-call]


def _traced_scatter(parts: Tensor, *sent: Any) -> Tensor:
    return cast(Tensor, _Scatter.apply(parts, _in_graph(*sent)))  # type: ignore[no-untyped-call]


_library = torch.library.Library("fourfold", "FRAGMENT")
_SENT = "int collectives, str axis, int dim, str purpose"
for _signature, _run in (
    (f"gather(Tensor own, {_SENT}) -> Tensor", _traced_gather),
    (f"gather_for_all(Tensor own, {_SENT}, int place) -> Tensor", _traced_gather_for_all),
    (f"scatter(Tensor parts, {_SENT}) -> Tensor", _traced_scatter),
):
    _library.define(_signature)
    _library.impl(_signature.partition("(")[0], _run, "CompositeImplicitAutograd")
