"""The algorithm: one linear layer on the grid.

O = I W^T, with I: tokens x in, W: out x in. The input's features are cut over ``in_axis``, the output's over
``out_axis``; the tokens are cut over data and z.

    forward    O = I W^T on this rank's block          a part of a sum over in_axis
               all-reduce O over in_axis, a chunk of the tokens in flight while the next is multiplied
    backward   dI = dO W                               a part of a sum over out_axis
               all-reduce dI over out_axis, in flight while
               dW = dO^T I                             whole: no rank but this one holds the block

`colwise` layers go from y to x, `rowwise` layers from x to y: what leaves the one is what enters the other, so no
activation ever changes its layout. A layer with an axis of None has that side whole on each rank. Weights on z and
data are the business of `weights.py`: here the block is complete.

Siblings, the linears that read one input (q, k, v; gate, up), are computed together at the first call of one of them
and cost one all-reduce in each direction, or as many as there are chunks.

Here an activation is replicated over the axis that does not cut its features. Where its tokens are cut over that one,
each all-reduce becomes a reduce-scatter and an all-gather: `sharded_linear.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Pending
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import NO_PARTS, GradientAxes, InFlight, await_gradient, sum_backward
from fourfold.parallel.dropout import Dropout
from fourfold.parallel.sequence import Cuts, Tokens
from fourfold.parallel.sharded_linear import own_biases, own_columns, sharded_linear
from fourfold.weights.api import summed_weight
from fourfold.weights.overlap import Overlap


class _LinearFunction(torch.autograd.Function):
    """Several weights on one input. ``columns[i]`` says in which output, and from which column on, weight i writes."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        group: FusedLinearGroup,
        flight: InFlight,
        columns: Sequence[tuple[int, int]],
        widths: Sequence[int],
        transposed: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(input, *weights)
        ctx.group, ctx.flight, ctx.columns, ctx.transposed = group, flight, columns, transposed
        tokens = input.reshape(-1, input.shape[-1])
        # One flat buffer for all outputs, so that one all-reduce serves them all without a copy.
        flat = tokens.new_empty(tokens.shape[0] * sum(widths))
        outputs = [
            part.view(tokens.shape[0], -1) for part in flat.split([tokens.shape[0] * w for w in widths])
        ]
        for piece, rows_of_output in group.chunks(flat, outputs):
            for weight, (output, column) in zip(weights, columns, strict=True):
                rows = rows_of_output.get(output)
                if rows is not None:
                    out_by_in = weight.t() if transposed else weight
                    out = outputs[output][rows].narrow(1, column, out_by_in.shape[0])
                    torch.mm(tokens[rows], out_by_in.t(), out=out)
            flight.outputs.append(group.all_reduce(piece, group.in_axis))
        # `.data`: the outputs share storage but are independent tensors, so that a model may change one in place.
        return tuple(o.view(*input.shape[:-1], o.shape[-1]).data for o in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        input, *weights = ctx.saved_tensors
        group: FusedLinearGroup = ctx.group
        tokens = input.reshape(-1, input.shape[-1])
        used: list[tuple[int, Tensor, Tensor]] = []
        for i, (weight, (output, column)) in enumerate(zip(weights, ctx.columns, strict=True)):
            gradient = gradients[output]
            if gradient is None:  # an output that nobody used
                continue
            width = weight.shape[1 if ctx.transposed else 0]
            used.append((i, weight, gradient.reshape(tokens.shape[0], -1).narrow(1, column, width)))

        input_gradient: Tensor | None = None
        if ctx.needs_input_grad[0] and used:
            for _, weight, gradient in used:
                out_by_in = weight.t() if ctx.transposed else weight
                if input_gradient is None:
                    input_gradient = gradient @ out_by_in
                else:
                    input_gradient.addmm_(gradient, out_by_in)
            assert input_gradient is not None
            ctx.flight.input_gradient = group.all_reduce(input_gradient, group.out_axis)
            if not group.overlap.backward:
                ctx.flight.input_gradient.wait()

        weight_gradients: list[Tensor | None] = [None] * len(weights)
        for i, _, gradient in used:
            if ctx.needs_input_grad[6 + i]:
                weight_gradients[i] = tokens.t() @ gradient if ctx.transposed else gradient.t() @ tokens
        if input_gradient is not None:
            input_gradient = input_gradient.view(input.shape)
        return (input_gradient, None, None, None, None, None, *weight_gradients)


class _Ready(threading.local):
    """Results that wait for their siblings' calls; for each thread, because lanes are threads."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.version = -1
        self.results: dict[int, Tensor] = {}


class FusedLinearGroup:
    """Linears of one module that may read the same input.

    The first call of a member computes all of them; the others then take what is theirs. Who turns out to read
    another input, in the first forward, leaves the group: the result was right before, and is cheaper after.
    """

    def __init__(
        self,
        grid: Grid,
        in_axis: Axis | None,
        out_axis: Axis | None,
        overlap: Overlap,
        tokens: Tokens | None = None,
    ) -> None:
        self.grid, self.in_axis, self.out_axis, self.overlap = grid, in_axis, out_axis, overlap
        self.tokens = tokens
        self.members: list[Linear4D] = []
        self._mine = _Ready()
        self.settled = False

    def __call__(self, member: Linear4D, input: Tensor) -> Tensor:
        if input.is_inference():
            # Such a tensor has no version that would tell whether it changed since a sibling read it.
            return self._compute(input, [member])[0]
        mine = self._mine
        same = mine.input is input and mine.version == input._version
        if same and id(member) in mine.results:
            output = mine.results.pop(id(member))
            if not mine.results:
                mine.input = None
            return output
        if mine.results and not self.settled and mine.input is not input:
            self._split(member)
            if member.group is not self:
                return member.group(member, input)
        outputs = self._compute(input, self.members)
        mine.results = {id(m): o for m, o in zip(self.members, outputs, strict=True)}
        mine.input, mine.version = (input, input._version) if len(self.members) > 1 else (None, -1)
        output = mine.results.pop(id(member))
        return output

    def names(self) -> str:
        return "+".join(m.name if i == 0 else m.name.rpartition(".")[2] for i, m in enumerate(self.members))

    def all_reduce(self, tensor: Tensor, axis: Axis | None) -> Pending:
        return self.grid.collectives.all_reduce(tensor, axis, "activation", module=self.names())

    def chunks(self, flat: Tensor, outputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, dict[int, slice]]]:
        """Pieces of ``flat``, the memory of all outputs, and the rows of which output each of them is."""
        count = self.overlap.chunks_of(flat, self.grid.target) if self.grid.size(self.in_axis) > 1 else 1
        if count == 1:
            yield flat, {i: slice(None) for i in range(len(outputs))}
            return
        for i, output in enumerate(outputs):
            share = max(1, round(count * output.numel() / flat.numel()))
            rows = -(-output.shape[0] // share)
            for start in range(0, output.shape[0], rows):
                part = slice(start, start + rows)
                yield output[part], {i: part}

    def settle(self) -> None:
        """A forward is over. After the first, who was never asked for leaves; after any, nothing is kept."""
        mine = self._mine
        if not torch.is_inference_mode_enabled():
            if not self.settled and mine.results:
                for other in [m for m in self.members if id(m) in mine.results]:
                    self._leave(other)
            self.settled = True
        mine.results, mine.input = {}, None

    def _split(self, member: Linear4D) -> None:
        """``member`` reads another input than the one whose results still wait."""
        mine = self._mine
        if id(member) in mine.results:
            self._leave(member)
        else:
            # It was served from the old input and now asks again: a new pass, in which the waiting never asked.
            for other in [m for m in self.members if id(m) in mine.results]:
                self._leave(other)

    def _leave(self, member: Linear4D) -> None:
        self.members.remove(member)
        self._mine.results.pop(id(member), None)
        alone = FusedLinearGroup(self.grid, self.in_axis, self.out_axis, self.overlap, self.tokens)
        alone.members, alone.settled = [member], True
        member.group = alone

    def _compute(self, input: Tensor, members: Sequence[Linear4D]) -> tuple[Tensor, ...]:
        if self.tokens is not None:
            return sharded_linear(self, input, members)
        columns: list[tuple[int, int]] = []
        widths: list[int] = []
        weights: list[Tensor] = []
        transposed = members[0].transposed
        for output, member in enumerate(members):
            member.check_input(input)
            column = 0
            for weight in member.local("weight"):
                weights.append(weight)
                columns.append((output, column))
                column += weight.shape[1 if transposed else 0]
            widths.append(column)
        flight = InFlight()
        if self.grid.size(self.out_axis) > 1:
            input = await_gradient(input, flight, self.grid.collectives)
        outputs = _LinearFunction.apply(input, self, flight, columns, widths, transposed, *weights)  # type: ignore[no-untyped-call]
        if self.grid.size(self.in_axis) > 1:
            self.grid.collectives.turns.pass_on()
        for pending in flight.outputs:
            pending.wait()
        flight.outputs.clear()
        return cast(tuple[Tensor, ...], outputs)


class Linear4D(nn.Module):
    """A linear layer whose weight is a block on the grid; takes the place of `nn.Linear` or of GPT-2's `Conv1D`.

    A packed projection holds one weight for each of its segments (`weight_0`, `weight_1`, ...), side by side in its
    output, so that each rank gets its share of q, of k and of v.
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        group: FusedLinearGroup,
        *,
        transposed: bool,
        in_features: int,
        out_features: int,
        kept_rows: slice | None = None,
        shared_columns: int = 0,
        dropout: Dropout | None = None,
        cuts: Cuts | None = None,
        head: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.group, self.transposed = name, group, transposed
        # Where activations are cut by their tokens: how they come and leave.
        self.cuts, self.is_head = cuts, head
        self.in_features, self.out_features = in_features, out_features
        # Replicated key/value heads: all rows are here, this rank works with these.
        self._kept_rows = kept_rows
        # The last columns go to every x rank's heads, past the next colwise layer (rotary keys of latent attention).
        self._shared_columns = shared_columns
        self._dropout = dropout
        for key, parameter in parameters.items():
            self.register_parameter(key, parameter)
        self._weights = [key for key in parameters if key.startswith("weight")]
        self._biases = [key for key in parameters if key.startswith("bias")]
        group.members.append(self)

    def local(self, kind: str, axes: GradientAxes = NO_PARTS) -> list[Tensor]:
        """This rank's blocks of the weights, or of the biases; their gradients are summed over ``axes``."""
        if self._kept_rows is not None:
            # Each x rank uses, and has the gradient of, other rows of the same replicated weight.
            axes = replace(axes, parts=(*axes.parts, "x"))
        blocks = []
        for key in self._weights if kind == "weight" else self._biases:
            block = summed_weight(self, key, axes, self.group.grid, self.name, by_sibling=True)
            blocks.append(block if self._kept_rows is None else block[self._kept_rows])
        return blocks

    def cuts_now(self) -> Cuts:
        """How activations come and leave, for the batch that is in the model."""
        assert self.cuts is not None
        assert self.group.tokens is not None
        return self.group.tokens.now(self.cuts)

    def check_input(self, input: Tensor) -> None:
        group = self.group
        parts = group.grid.size(group.in_axis)
        over = f"{group.in_axis}={parts}"
        if self.cuts is not None and self.cuts.enter == "features":
            parts *= group.grid.size(group.out_axis)
            over += f" and {group.out_axis}={group.grid.size(group.out_axis)}"
        expected = self.in_features // parts
        if input.shape[-1] != expected:
            raise ValueError(
                f"{self.name} expects {expected} input features on each rank (its {self.in_features} over "
                f"{over}), got {input.shape[-1]}: what feeds it does not keep "
                f"the layout of its role; give that module a role, or use {group.in_axis}=1"
            )

    def forward(self, input: Tensor) -> Tensor:
        if self._dropout is not None:
            self._dropout.leave()
        output = self.group(self, input)
        cuts = None if self.cuts is None else self.cuts_now()
        if self._biases:
            biases = self.local("bias") if cuts is None else own_biases(self, cuts)
            output = output + (biases[0] if len(biases) == 1 else torch.cat(biases))
        if self._shared_columns:
            own, shared = output.split(
                [output.shape[-1] - self._shared_columns, self._shared_columns], dim=-1
            )
            shared = sum_backward(shared, self.group.grid.collectives, "x", "activation", self.name)
            output = torch.cat([own, shared], dim=-1)
        if cuts is not None:
            output = own_columns(self, cuts, output)
        if self._dropout is not None:
            # Heads are other ones on each y rank also where their keys and values are not.
            cut_twice = cuts is not None and (cuts.leave != "whole" or cuts.used_columns is not None)
            self._dropout.enter(self.group.out_axis, self.group.in_axis if cut_twice else None)
        return output

    def extra_repr(self) -> str:
        axes = f"{self.group.in_axis} -> {self.group.out_axis}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {axes}"
