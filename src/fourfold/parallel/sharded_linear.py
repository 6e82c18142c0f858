"""The algorithm with activations that are cut over both tensor axes: nothing is kept or computed twice.

O = I W^T as in `linear.py`, with the same block of W on each rank. There, I is replicated over ``out_axis`` and O over
``in_axis``. Here the tokens are cut over the axis that does not cut the features:

    forward    all-gather I over out_axis
               O = I W^T on this rank's block          a part of a sum over in_axis
               reduce-scatter O over in_axis, a chunk of it in flight while the next is multiplied
    backward   all-gather dO over in_axis, in flight from when it is known
               dI = dO W                               a part of a sum over out_axis
               reduce-scatter dI over out_axis, in flight while
               dW = dO^T I                             whole: no rank but this one holds the block

What leaves a `colwise` layer, tokens on y and features on x, is what enters a `rowwise` one, which leaves what enters
the next: tokens on x, features on y. An all-reduce is a reduce-scatter and an all-gather, so no byte more is sent.

Attention works on whole sequences of some heads. There the second cut, too, is one of features (``features``): what q, k
and v leave is scattered by heads, and the output projection gathers heads. Where heads do not divide, what they leave
is ``whole`` on each rank of the axis, all-reduced as in `linear.py`.

Siblings cost one collective each time, as in `linear.py`.

The gathered input is kept for dW, or, without ``Overlap.keep_inputs``, gathered a second time behind dI's matmul.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fourfold.errors import UnsupportedError
from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Pending
from fourfold.mesh.reductions import GradientAxes, await_gradient, sum_backward
from fourfold.parallel.sequence import Cut, Cuts, ShapeProxy
from fourfold.parallel.sharded_call import Call, multiply, pieces

if TYPE_CHECKING:
    from fourfold.parallel.linear import FusedLinearGroup, Linear4D


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Call, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an output that nobody used has no gradient to be gathered
        group = call.group
        own = input.reshape(-1, input.shape[-1])
        whole, pending = call.gather(own, group.out_axis, call.enter, "activation")
        if whole.numel() > own.numel():
            group.grid.collectives.turns.pass_on()
        pending.wait()
        outputs: dict[int, Tensor] = {}
        for members in call.alike():
            leave = call.leaves[members[0]]
            blocks = {m: call.blocks(weights, m) for m in members}
            widths = [sum(block.shape[0] for block in blocks[m]) for m in members]
            kept, chunks = call.outputs(members, widths, whole)
            for chunk in chunks:
                for member, rows, memory in chunk.products:
                    for out, i, piece in pieces(memory, blocks[member], len(whole)):
                        multiply(whole[i][rows], piece.t(), out, first=i == 0)
                call.flight.outputs.append(call.reduce(chunk.own, chunk.parts, group.in_axis, leave))
            for member, own_output in zip(members, kept, strict=True):
                flat = (*[1] * (input.ndim - 2), len(own_output))
                leading = call.batch if leave != "tokens" else call.seen_as or flat
                # `.data`: the collective writes into this memory after autograd has taken over the output.
                outputs[member] = own_output.view(*leading, own_output.shape[1]).data
        ctx.call, ctx.input_shape = call, input.shape
        ctx.save_for_backward(whole if group.overlap.keep_inputs else own, *weights)
        return tuple(outputs[member] for member in range(len(outputs)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        group = call.group
        whole, *weights = ctx.saved_tensors
        pending_input = Pending()
        if not group.overlap.keep_inputs:
            whole, pending_input = call.gather(whole, group.out_axis, call.enter, "regather")
            if not group.overlap.backward:
                pending_input.wait()

        input_parts = torch.empty_like(whole, memory_format=torch.contiguous_format)
        written: set[int] = set()
        arrived: dict[int, Tensor] = {}
        for member, own in enumerate(gradients):
            if own is None:
                continue
            arrived[member] = call.gathered_gradient(member, own)
            if ctx.needs_input_grad[0]:
                for gradient, i, piece in pieces(arrived[member], call.blocks(weights, member), len(whole)):
                    multiply(gradient, piece, input_parts[i], first=i not in written)
                    written.add(i)
        input_gradient: Tensor | None = None
        if written:
            input_gradient = (
                whole.new_empty(ctx.input_shape) if call.cuts(group.out_axis, call.enter) else input_parts
            )
            pending = call.reduce(input_gradient, input_parts, group.out_axis, call.enter)
            call.flight.input_gradient = pending
            if not group.overlap.backward:
                pending.wait()
            input_gradient = input_gradient.view(ctx.input_shape)

        pending_input.wait()
        weight_gradients: list[Tensor | None] = [None] * len(weights)
        for member, parts in arrived.items():
            span = call.spans[member]
            if any(ctx.needs_input_grad[2:][span]):
                made = [torch.empty_like(w) for w in weights[span]]
                weight_gradients[span] = made
                out_by_in = [m.t() if call.transposed else m for m in made]
                for gradient, i, piece in pieces(parts, out_by_in, len(whole)):
                    torch.mm(gradient.t(), whole[i], out=piece)
        return (input_gradient, None, *weight_gradients)


class _GradientLeaves(torch.autograd.Function):
    """Stands behind a member, so before it in backward: there the gradient of its output starts to be gathered.

    Until the members' own backward autograd does what else is ready: the other half of an interleaved batch.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: Call, member: int) -> Tensor:
        ctx.call, ctx.member = call, member
        if call.leaves[member] == "features" and len(call.leaves) > 1:
            # Attention keeps v, and of q and k what it makes of them: v is not to keep the memory that all three share.
            return output.clone()
        return output.data  # and not a view, which a model's code could not change in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.call.add_gradient(ctx.member, gradients[0])
        return gradients[0], None, None


def sharded_linear(group: FusedLinearGroup, input: Tensor, members: Sequence[Linear4D]) -> tuple[Tensor, ...]:
    """The outputs of ``members``, linears that read one input."""
    tokens = group.tokens
    assert tokens is not None
    cuts = [member.cuts_now() for member in members]
    enter = cuts[0].enter
    input = input.own if isinstance(input, ShapeProxy) else _checked(group, input, enter, members[0].name)
    for member in members:
        member.check_input(input)
    weights = [member.local("weight") for member in members]
    ends = list(itertools.accumulate(len(w) for w in weights))
    spans = [slice(end - len(w), end) for end, w in zip(ends, weights, strict=True)]
    leaves = [c.leave for c in cuts]
    call = Call(group, enter, leaves, spans, members[0].transposed, tokens.shape, _seen_as(group, members[0]))
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
    if not any(call.cuts(group.in_axis, leave) for leave in call.leaves):
        return outputs
    collectives.turns.begin_section()
    return tuple(
        cast(Tensor, _GradientLeaves.apply(output, call, member))  # type: ignore[no-untyped-call]
        for member, output in enumerate(outputs)
    )


def _seen_as(group: FusedLinearGroup, member: Linear4D) -> tuple[int, int] | None:
    """(sequences, length), where a rank's tokens are whole samples and the model's code reads that: attention, and the loss."""
    assert group.tokens is not None
    sequences, length = group.tokens.shape
    if member.cuts_now().by_samples and group.in_axis == "y":
        return sequences // group.grid.y, length
    return (sequences, length) if member.is_head and group.grid.size(group.in_axis) == 1 else None


def _checked(group: FusedLinearGroup, input: Tensor, enter: Cut, name: str) -> Tensor:
    """``input`` with the tokens that this rank should have of it."""
    assert group.tokens is not None
    if enter == "tokens" and group.out_axis == "x":
        return group.tokens.own(input, name)
    expected = group.tokens.count(group.out_axis if enter == "tokens" else None)
    rows = input.shape[:-1].numel()
    if rows != expected:
        raise UnsupportedError(
            f"{name} got {rows} tokens instead of the {expected} of the batch {group.tokens.shape} that it should have, so "
            "what feeds it does not work token by token; use activations='replicated'"
        )
    return input


def own_biases(member: Linear4D, cuts: Cuts) -> list[Tensor]:
    """Each rank of ``in_axis`` adds them to other tokens or, a part of them, to its own features."""
    grid, axis = member.group.grid, member.group.in_axis
    over: tuple[Axis, ...] = () if axis is None else (axis,)
    assert member.cuts is not None
    if cuts.leave == "whole":
        # With samples that divide they would be added to those of a y rank.
        return member.local("bias", GradientAxes(whole=over if member.cuts.by_samples else ()))
    biases = member.local("bias", GradientAxes(parts=over))
    if cuts.leave == "features":
        biases = [b.chunk(grid.size(axis))[grid.coordinate(axis)] for b in biases]
    return biases


def own_columns(member: Linear4D, cuts: Cuts, output: Tensor) -> Tensor:
    """What the model's code sees of a member's output."""
    group = member.group
    if cuts.used_columns is not None:
        output = sum_backward(output, group.grid.collectives, group.in_axis, "shared", member.name)
        return output[..., cuts.used_columns]
    return output
