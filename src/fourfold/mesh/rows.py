"""Rows that ranks of an axis send each other, as many as the data says: a differentiable all-to-all whose sizes are exchanged first.

The sizes are the only values that the host waits for. A rank that gets no row has one of zeros instead, so that all ranks
have the same graph, and so the same collectives in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Purpose
from fourfold.mesh.kept import computed_once


@dataclass(frozen=True)
class RowSizes:
    """How many rows this rank sends to each rank of an axis, and gets from it."""

    sent: Sequence[int]
    received: Sequence[int]

    def backwards(self) -> RowSizes:
        return RowSizes(self.received, self.sent)


@dataclass(frozen=True)
class _RowExchange:
    collectives: Collectives
    axis: Axis
    sizes: RowSizes
    purpose: Purpose
    name: str

    def send(self, rows: Tensor, *, in_forward: bool) -> Tensor:
        sent, received = self.sizes.sent, self.sizes.received
        outgoing, count = rows[: sum(sent)].contiguous(), sum(received)
        arrived = rows.new_zeros(1, *rows.shape[1:]) if count == 0 else rows.new_empty(count, *rows.shape[1:])
        pending = self.collectives.all_to_all_rows(
            arrived[:count], outgoing, sent, received, self.axis, self.purpose, module=self.name
        )
        self.collectives.wait(pending, in_turns=in_forward)
        return arrived


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _RowExchange) -> Tensor:
        ctx.exchange, ctx.rows = exchange, len(rows)
        return computed_once(rows.device, lambda: exchange.send(rows, in_forward=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        there: _RowExchange = ctx.exchange
        back = _RowExchange(there.collectives, there.axis, there.sizes.backwards(), there.purpose, there.name)
        # The row of zeros where none came is one of the input only if that had it.
        return back.send(gradients[0], in_forward=False)[: ctx.rows], None


def exchange_counts(counts: Tensor, collectives: Collectives, axis: Axis, name: str = "") -> Tensor:
    """``counts[i]`` is what this rank says to rank i; the result has what they say to this one."""

    def exchange() -> Tensor:
        told = torch.empty_like(counts)
        pending = collectives.all_to_all(told, counts.contiguous(), axis, "counts", module=name)
        collectives.wait(pending, in_turns=True)
        return told

    return computed_once(counts.device, exchange)


class _Expected:
    """Of a dry run, which has no values: the rows of the rank with most, as a multiple of the mean. None: sizes are read."""

    load: float | None = None


@contextmanager
def expected_load(load: float) -> Iterator[None]:
    """Sizes inside are those of a rank that gets ``load`` times the mean, or as many rows as it can, whichever is less."""
    if not load >= 1:
        raise ValueError(f"the expected load of experts is {load}, a multiple of the mean; use 1.0 or more")
    before, _Expected.load = _Expected.load, load
    try:
        yield
    finally:
        _Expected.load = before


def sizes_of(
    counts: Tensor, told: Tensor, collectives: Collectives, axis: Axis, total: int, chosen: int = 1
) -> RowSizes:
    """How many rows go where: ``counts`` by rank of those that this one sends, ``total`` together, and those that it was ``told``.

    ``chosen`` of the rows are of one token, each for another expert.
    """
    ranks, group = collectives.size(axis), collectives.group(axis)
    if _Expected.load is not None:
        most = total // chosen * min(chosen, counts.numel() // ranks)
        own = total if ranks == 1 else round(min(most, _Expected.load * total / ranks))
        others = max(1, ranks - 1)
        sent = [(total - own) // others + (rank < (total - own) % others) for rank in range(ranks - 1)]
        sent.insert(group.rank(), own)
        return RowSizes(sent, [own] * ranks)
    sent, received = torch.stack([counts.view(ranks, -1).sum(1), told.view(ranks, -1).sum(1)]).tolist()
    return RowSizes(sent, received)


def send_rows(
    rows: Tensor, sizes: RowSizes, collectives: Collectives, axis: Axis, purpose: Purpose, name: str = ""
) -> Tensor:
    """The rows that the ranks of an axis send this one, in the order of the ranks; ``rows`` are in the order of theirs.

    At least one, of zeros if none came, and of ``rows`` only those that ``sizes`` count are sent. In backward their gradients go back.
    """
    exchange = _RowExchange(collectives, axis, sizes, purpose, name)
    return cast(Tensor, _SendRows.apply(rows, exchange))  # type: ignore[no-untyped-call]
