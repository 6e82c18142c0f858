"""What linears that read one token-sharded input gather, multiply and scatter: the parts of `sharded_linear.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.grid import Axis
from fourfold.parallel.collectives import Pending, Purpose
from fourfold.parallel.sums import InFlight
from fourfold.parallel.tokens import Cut

if TYPE_CHECKING:
    from fourfold.parallel.linear import SiblingGroup


@dataclass
class Call:
    """One computation of a group."""

    group: SiblingGroup
    enter: Cut
    leaves: Sequence[Cut]
    # Which of the weights each member has.
    spans: Sequence[slice]
    transposed: bool
    # (sequences, length), the shape of all tokens.
    batch: tuple[int, ...]
    flight: InFlight = field(default_factory=InFlight)
    # Gradients of the members' outputs, on their way from the ranks of ``in_axis``.
    gradients: dict[int, tuple[Tensor, Pending]] = field(default_factory=dict)

    def gather(self, own: Tensor, axis: Axis | None, cut: Cut, purpose: Purpose) -> tuple[Tensor, Pending]:
        """What the ranks of ``axis`` have: [1, tokens, features], or [ranks, tokens, features of one] by features."""
        ranks = 1 if cut == "whole" else self.group.grid.size(axis)
        if axis is None or ranks == 1:
            return own.unsqueeze(0), Pending()
        parts = ranks if cut == "features" else 1
        whole = own.new_empty(parts, own.shape[0] * ranks // parts, own.shape[1])
        collectives = self.group.grid.collectives
        return whole, collectives.all_gather(
            whole, own.contiguous(), axis, purpose, module=self.group.names()
        )

    def reduce(self, own: Tensor, parts: Tensor, axis: Axis | None, cut: Cut) -> Pending:
        """``own``, the sums of ``parts`` that are this rank's; in place, where all are."""
        group = self.group
        if axis is None or not self.cuts(axis, cut):
            return group.all_reduce(parts, axis)
        collectives = group.grid.collectives
        return collectives.reduce_scatter(own, parts, axis, "activation", module=group.names())

    def cuts(self, axis: Axis | None, cut: Cut) -> bool:
        return cut != "whole" and self.group.grid.size(axis) > 1

    def output(self, whole: Tensor, blocks: Sequence[Tensor], leave: Cut) -> tuple[Tensor, Tensor]:
        """Memory for what a rank keeps of a member's output, and for the parts of sums that it gives."""
        ranks = self.group.grid.size(self.group.in_axis)
        tokens, width = whole.shape[1], sum(block.shape[0] for block in blocks)
        parts = whole.new_empty(tokens * width)
        if not self.cuts(self.group.in_axis, leave):
            return parts.view(tokens, width), parts
        shape = (tokens // ranks, width) if leave == "tokens" else (tokens, width // ranks)
        return whole.new_empty(shape), parts

    def chunks(
        self, own: Tensor, parts: Tensor, leave: Cut
    ) -> Iterator[tuple[Tensor, Tensor, Sequence[slice]]]:
        """(a chunk of ``own``, the memory of its parts laid out as `gather` does, which tokens these are)."""
        group = self.group
        ranks = group.grid.size(group.in_axis)
        by_features = ranks if leave == "features" else 1
        if not self.cuts(group.in_axis, leave):
            yield own, parts.view(1, *own.shape), [slice(None)]
            return
        count = group.overlap.chunks_of(parts, group.grid.target)
        size = -(-len(own) // count)
        for start in range(0, len(own), size):
            stop = min(start + size, len(own))
            memory = parts[start * own.shape[1] * ranks : stop * own.shape[1] * ranks]
            sources = [slice(start, stop)]
            if leave == "tokens":  # the same rows of each rank's tokens; all rows, in one piece
                firsts = range(0, ranks * len(own), len(own))
                sources = [slice(f + start, f + stop) for f in firsts] if count > 1 else [slice(None)]
            yield own[start:stop], memory.view(by_features, -1, own.shape[1]), sources

    def gather_gradient(self, member: int, own: Tensor) -> None:
        flat = own.reshape(-1, own.shape[-1])
        self.gradients[member] = self.gather(flat, self.group.in_axis, self.leaves[member], "activation")
        if not self.group.overlap.backward:
            self.gradients[member][1].wait()

    def gathered_gradient(self, member: int, own: Tensor) -> Tensor:
        if member not in self.gradients:  # it is whole
            self.gather_gradient(member, own)
        gradient, pending = self.gradients.pop(member)
        pending.wait()
        return gradient

    def blocks(self, weights: Sequence[Tensor], member: int) -> list[Tensor]:
        """A member's weights, out x in."""
        return [w.t() if self.transposed else w for w in weights[self.spans[member]]]


def pieces(parts: Tensor, blocks: Sequence[Tensor], terms: int) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(columns of an output, which part of the input, the piece of a weight between them).

    One for each weight of a member, unless the output or the input is cut by its features.
    """
    for part, rows in zip(parts, zip(*(b.chunk(len(parts)) for b in blocks), strict=True), strict=True):
        columns = torch.split(part, [r.shape[0] for r in rows], dim=1)
        for column, row in zip(columns, rows, strict=True):
            for i, piece in enumerate(row.chunk(terms, dim=1)):
                yield column, i, piece


def multiply(a: Tensor, b: Tensor, out: Tensor, *, first: bool) -> None:
    """``out = a b``, or add to what the first has written."""
    if first:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, out=out)
