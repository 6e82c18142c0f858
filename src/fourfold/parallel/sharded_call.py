"""What linears that read one token-sharded input gather, multiply and scatter: the parts of `sharded_linear.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Pending, Purpose
from fourfold.mesh.reductions import InFlight
from fourfold.parallel.sequence import Cut

if TYPE_CHECKING:
    from fourfold.parallel.linear import FusedLinearGroup


@dataclass(frozen=True)
class Chunk:
    """What one collective reduces of the members' outputs."""

    own: Tensor
    # [ranks, own]: this rank's parts of what each of them keeps.
    parts: Tensor
    # (member, which tokens, where to write): one for each product of tokens and weights.
    products: list[tuple[int, slice, Tensor]]


@dataclass
class Call:
    """One computation of a group."""

    group: FusedLinearGroup
    enter: Cut
    leaves: Sequence[Cut]
    # Which of the weights each member has.
    spans: Sequence[slice]
    transposed: bool
    # (sequences, length), the shape of all tokens.
    batch: tuple[int, ...]
    # How the model's code is to see the tokens that leave, where it reads their shape.
    seen_as: tuple[int, int] | None
    flight: InFlight = field(default_factory=InFlight)
    # Gradients of the members' outputs that wait for those of the others; and those on their way from the other ranks.
    waiting: dict[int, Tensor] = field(default_factory=dict)
    gathered: dict[int, tuple[Tensor, Pending]] = field(default_factory=dict)

    def gather(self, own: Tensor, axis: Axis | None, cut: Cut, purpose: Purpose) -> tuple[Tensor, Pending]:
        """What the ranks of ``axis`` have: [1, tokens, features], or [ranks, tokens, features of one] by features."""
        if axis is None or not self.cuts(axis, cut):
            return own.unsqueeze(0), Pending()
        ranks = self.group.grid.size(axis)
        parts = ranks if cut == "features" else 1
        whole = own.new_empty(parts, own.shape[0] * ranks // parts, own.shape[1])
        return whole, self._all_gather(whole, own.contiguous(), axis, purpose)

    def _all_gather(self, whole: Tensor, own: Tensor, axis: Axis, purpose: Purpose) -> Pending:
        return self.group.grid.collectives.all_gather(whole, own, axis, purpose, module=self.group.names())

    def reduce(self, own: Tensor, parts: Tensor, axis: Axis | None, cut: Cut) -> Pending:
        """``own``, the sums of ``parts`` that are this rank's; in place, where all are."""
        group = self.group
        if axis is None or not self.cuts(axis, cut):
            return group.all_reduce(parts, axis)
        collectives = group.grid.collectives
        return collectives.reduce_scatter(own, parts, axis, "activation", module=group.names())

    def cuts(self, axis: Axis | None, cut: Cut) -> bool:
        return cut != "whole" and self.group.grid.size(axis) > 1

    # -- outputs ------------------------------------------------------------------------------------------------------

    def alike(self) -> list[list[int]]:
        """Members whose outputs are cut in the same way: one collective serves them all."""
        found: dict[Cut, list[int]] = {}
        for member, leave in enumerate(self.leaves):
            found.setdefault(leave, []).append(member)
        return list(found.values())

    def outputs(
        self, members: Sequence[int], widths: Sequence[int], whole: Tensor
    ) -> tuple[list[Tensor], list[Chunk]]:
        """Memory for what a rank keeps of the outputs of ``members``, cut alike; the same in chunks."""
        group, leave = self.group, self.leaves[members[0]]
        ranks = group.grid.size(group.in_axis) if self.cuts(group.in_axis, leave) else 1
        rows = whole.shape[1] // ranks if leave == "tokens" else whole.shape[1]
        columns = [width // ranks if leave == "features" else width for width in widths]
        if group.grid.size(group.in_axis) == 1:
            # Nothing is sent. Memory for each, so that who keeps one of them (attention v) does not keep the others.
            apart = [whole.new_empty(rows, width) for width in columns]
            return apart, [
                Chunk(out.view(-1), out.view(1, -1), [(member, slice(None), out.unsqueeze(0))])
                for member, out in zip(members, apart, strict=True)
            ]
        parts = whole.new_empty(ranks * rows * sum(columns))
        own = whole.new_empty(rows * sum(columns)) if ranks > 1 else parts
        chunks, end = [], 0
        for spans in self._divide(members, columns, rows, parts):
            start, end = end, end + sum((last - first) * width for _, first, last, width in spans)
            memory = parts[ranks * start : ranks * end].view(ranks, end - start)
            chunks.append(Chunk(own[start:end], memory, self._products(memory, spans, rows, leave)))
        outputs = own.split([rows * width for width in columns])
        return [o.view(rows, width) for o, width in zip(outputs, columns, strict=True)], chunks

    def _divide(
        self, members: Sequence[int], columns: Sequence[int], rows: int, parts: Tensor
    ) -> list[list[tuple[int, int, int, int]]]:
        """(member, its first row, behind its last, columns) of each chunk: all in one, or several of each member."""
        group = self.group
        count = group.overlap.chunks_of(parts, group.grid.target)
        if count == 1:
            return [[(m, 0, rows, width) for m, width in zip(members, columns, strict=True)]]
        found = []
        for m, width in zip(members, columns, strict=True):
            size = -(-rows // max(1, round(count * width / sum(columns))))
            found += [[(m, start, min(start + size, rows), width)] for start in range(0, rows, size)]
        return found

    @staticmethod
    def _products(
        memory: Tensor, spans: Sequence[tuple[int, int, int, int]], rows: int, leave: Cut
    ) -> list[tuple[int, slice, Tensor]]:
        found: list[tuple[int, slice, Tensor]] = []
        place = 0
        for m, first, last, width in spans:
            size = (last - first) * width
            out = memory[:, place : place + size].unflatten(1, (last - first, width))
            place += size
            if leave != "tokens":
                found.append((m, slice(first, last), out))
            elif out.is_contiguous() and last - first == rows:
                found.append((m, slice(None), out.view(1, -1, width)))
            else:  # these rows of each rank's tokens
                starts = range(first, rows * len(out), rows)
                found += [
                    (m, slice(s, s + last - first), part)
                    for s, part in zip(starts, out.split(1), strict=True)
                ]
        return found

    # -- gradients ----------------------------------------------------------------------------------------------------

    def add_gradient(self, member: int, own: Tensor) -> None:
        """Of a member's output. When those of all that are cut alike are known, they start to be gathered."""
        self.waiting[member] = own
        alike = next(members for members in self.alike() if member in members)
        if all(m in self.waiting for m in alike):
            self._gather_gradients(alike)

    def _gather_gradients(self, members: Sequence[int]) -> None:
        """By one collective."""
        axis, leave = self.group.in_axis, self.leaves[members[0]]
        flats = [g.reshape(-1, g.shape[-1]) for g in map(self.waiting.pop, members)]
        if len(flats) == 1 or axis is None or not self.cuts(axis, leave):
            for member, own in zip(members, flats, strict=True):
                self.gathered[member] = self.gather(own, axis, leave, "activation")
        else:
            ranks = self.group.grid.size(axis)
            own = torch.cat([flat.reshape(-1) for flat in flats])
            whole = own.new_empty(ranks, own.numel())
            pending = self._all_gather(whole, own, axis, "activation")
            for member, part, flat in zip(
                members, whole.split([f.numel() for f in flats], dim=1), flats, strict=True
            ):
                self.gathered[member] = part.unflatten(1, flat.shape), pending
        if not self.group.overlap.backward:
            for member in members:
                self.gathered[member][1].wait()

    def gathered_gradient(self, member: int, own: Tensor) -> Tensor:
        """[1, tokens, features], or [ranks, tokens, features of one] by features."""
        if member not in self.gathered:  # it is whole, or a sibling's output was not used
            self.waiting[member] = own
            self._gather_gradients([m for m in self.waiting if self.leaves[m] == self.leaves[member]])
        gradient, pending = self.gathered.pop(member)
        pending.wait()
        if self.leaves[member] == "tokens":
            gradient = gradient.reshape(1, -1, gradient.shape[-1])
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
