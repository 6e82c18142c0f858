"""The algorithm with activations that are cut over both tensor axes: nothing is kept or computed twice.

O = I W^T as in `linear.py`, with the same block of W on each rank. There, I is replicated over ``out_axis`` and O over
``in_axis``. Here the tokens are cut over the axis that does not cut the features:

    forward    all-gather I over out_axis
               O = I W^T on this rank's block          a part of a sum over in_axis
               reduce-scatter O over in_axis, in flight while the next sibling is multiplied
    backward   all-gather dO over in_axis, the next sibling's in flight while this one's is multiplied
               dI = dO W                               a part of a sum over out_axis
               reduce-scatter dI over out_axis, in flight while
               dW = dO^T I                             whole: no rank but this one holds the block

What leaves a `colwise` layer, tokens on y and features on x, is what enters a `rowwise` one, which leaves what enters
the next: tokens on x, features on y. An all-reduce is a reduce-scatter and an all-gather, so no byte more is sent.

Attention works on whole sequences of some heads. There the second cut, too, is one of features (``features``): what q, k
and v leave is scattered by heads, and the output projection gathers heads. Where heads do not divide, what they leave
is ``whole`` on each rank of the axis, all-reduced as in `linear.py`.

The gathered input is kept for dW, or, without ``Overlap.keep_inputs``, gathered a second time behind dI's matmul.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from fourfold.grid import Axis
from fourfold.parallel.collectives import Pending, Purpose
from fourfold.parallel.refused import Refused
from fourfold.parallel.sums import InFlight, await_gradient
from fourfold.parallel.tokens import StandIn

if TYPE_CHECKING:
    from fourfold.parallel.linear import Linear4D, SiblingGroup

# What the second axis cuts of an activation; the first one cuts its features.
Cut = Literal["tokens", "features", "whole"]


@dataclass(frozen=True)
class Cuts:
    """How a linear's input comes over ``out_axis``, and its output leaves over ``in_axis``."""

    enter: Cut
    leave: Cut
    # Key/value heads of which several ranks of ``in_axis`` use one: the columns that this rank uses of a whole output.
    used_columns: slice | None = None
    kv_heads: int = 0


@dataclass
class _Call:
    """One computation of a group."""

    group: SiblingGroup
    enter: Cut
    leaves: Sequence[Cut]
    # Which of the weights each member has.
    spans: Sequence[slice]
    transposed: bool
    # The shape of the input but for its features.
    leading: tuple[int, ...]
    flight: InFlight = field(default_factory=InFlight)

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

    def reduce(self, parts: Tensor, axis: Axis | None, cut: Cut) -> tuple[Tensor, Pending]:
        """The sums that are this rank's of ``parts``, laid out as `gather` gives them."""
        group = self.group
        if cut == "whole" or axis is None or group.grid.size(axis) == 1:
            return parts[0], group.all_reduce(parts, axis)
        rows = parts.shape[1] // (group.grid.size(axis) if cut == "tokens" else 1)
        own = parts.new_empty(rows, parts.shape[2])
        collectives = group.grid.collectives
        return own, collectives.reduce_scatter(own, parts, axis, "activation", module=group.names())

    def blocks(self, weights: Sequence[Tensor], member: int) -> list[Tensor]:
        """A member's weights, out x in."""
        return [w.t() if self.transposed else w for w in weights[self.spans[member]]]


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, call: _Call, *weights: Tensor) -> tuple[Tensor, ...]:
        group = call.group
        own = input.reshape(-1, input.shape[-1])
        whole, pending = call.gather(own, group.out_axis, call.enter, "activation")
        if whole.numel() > own.numel():
            group.grid.collectives.turns.pass_on()
        pending.wait()
        outputs = []
        for member, leave in enumerate(call.leaves):
            blocks = call.blocks(weights, member)
            ranks = group.grid.size(group.in_axis) if leave == "features" else 1
            width = sum(block.shape[0] for block in blocks) // ranks
            parts = whole.new_empty(ranks, whole.shape[1], width)
            for out, i, piece in _pieces(parts, blocks, len(whole)):
                _multiply(whole[i], piece.t(), out, first=i == 0)
            total, pending = call.reduce(parts, group.in_axis, leave)
            call.flight.outputs.append(pending)
            leading = (*(1 for _ in call.leading[1:]), len(total)) if leave == "tokens" else call.leading
            # `.data`: the collective writes into this memory after autograd has taken over the output.
            outputs.append(total.view(*leading, width).data)
        ctx.call, ctx.input_shape = call, input.shape
        ctx.save_for_backward(whole if group.overlap.keep_inputs else own, *weights)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        group = call.group
        whole, *weights = ctx.saved_tensors
        # Outputs that nobody used have no gradient.
        used = [
            (
                member,
                *call.gather(gradient.reshape(-1, gradient.shape[-1]), group.in_axis, leave, "activation"),
            )
            for member, (gradient, leave) in enumerate(zip(gradients, call.leaves, strict=True))
            if gradient is not None
        ]
        pending_input = Pending()
        if not group.overlap.keep_inputs:
            whole, pending_input = call.gather(whole, group.out_axis, call.enter, "regather")

        input_gradient: Tensor | None = None
        input_parts = torch.empty_like(whole, memory_format=torch.contiguous_format)
        written: set[int] = set()
        for member, parts, pending in used:
            pending.wait()
            if ctx.needs_input_grad[0]:
                for gradient, i, piece in _pieces(parts, call.blocks(weights, member), len(whole)):
                    _multiply(gradient, piece, input_parts[i], first=i not in written)
                    written.add(i)
        if written:
            input_gradient, call.flight.input_gradient = call.reduce(input_parts, group.out_axis, call.enter)
            if not group.overlap.backward:
                call.flight.input_gradient.wait()
            input_gradient = input_gradient.view(ctx.input_shape)

        pending_input.wait()
        weight_gradients: list[Tensor | None] = [None] * len(weights)
        for member, parts, _ in used:
            span = call.spans[member]
            if any(ctx.needs_input_grad[2:][span]):
                made = [torch.empty_like(w) for w in weights[span]]
                weight_gradients[span] = made
                out_by_in = [m.t() if call.transposed else m for m in made]
                for gradient, i, piece in _pieces(parts, out_by_in, len(whole)):
                    torch.mm(gradient.t(), whole[i], out=piece)
        return (input_gradient, None, *weight_gradients)


def _pieces(parts: Tensor, blocks: Sequence[Tensor], terms: int) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(columns of an output, which part of the input, the piece of a weight between them).

    One for each weight of a member, unless the output or the input is cut by its features.
    """
    for part, rows in zip(parts, zip(*(b.chunk(len(parts)) for b in blocks), strict=True), strict=True):
        columns = torch.split(part, [r.shape[0] for r in rows], dim=1)
        for column, row in zip(columns, rows, strict=True):
            for i, piece in enumerate(row.chunk(terms, dim=1)):
                yield column, i, piece


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, first: bool) -> None:
    """``out = a b``, or add to what the first has written."""
    if first:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, out=out)


def sharded_linear(group: SiblingGroup, input: Tensor, members: Sequence[Linear4D]) -> tuple[Tensor, ...]:
    """The outputs of ``members``, linears that read one input."""
    cuts = [cast(Cuts, member.cuts) for member in members]
    enter, leading = cuts[0].enter, tuple(input.shape[:-1])
    input = input.own if isinstance(input, StandIn) else _checked(group, input, enter, members[0].name)
    for member in members:
        member.check_input(input)
    weights = [member.local("weight") for member in members]
    ends = list(itertools.accumulate(len(w) for w in weights))
    spans = [slice(end - len(w), end) for end, w in zip(ends, weights, strict=True)]
    call = _Call(group, enter, [c.leave for c in cuts], spans, members[0].transposed, leading)
    collectives = group.grid.collectives
    if group.grid.size(group.out_axis) > 1:
        input = await_gradient(input, call.flight, collectives)
    outputs = cast(
        tuple[Tensor, ...],
        _ShardedLinear.apply(input, call, *(block for blocks in weights for block in blocks)),  # type: ignore[no-untyped-call]
    )
    if group.grid.size(group.in_axis) > 1:
        collectives.turns.pass_on()
    for pending in call.flight.outputs:
        pending.wait()
    call.flight.outputs.clear()
    return outputs


def _checked(group: SiblingGroup, input: Tensor, enter: Cut, name: str) -> Tensor:
    """``input`` with the tokens that this rank should have of it."""
    assert group.tokens is not None
    if enter == "tokens" and group.out_axis == "x":
        return group.tokens.own(input, name)
    expected = group.tokens.count(group.out_axis if enter == "tokens" else None)
    rows = input.shape[:-1].numel()
    if rows != expected:
        raise Refused(
            f"{name} got {rows} tokens instead of the {expected} of the batch {group.tokens.shape} that it should have, so "
            "what feeds it does not work token by token; use activations='replicated'"
        )
    return input
