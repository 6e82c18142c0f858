"""The algorithm: one linear layer on the grid.

O = I W^T, with I: tokens x in, W: out x in. The input's features are sharded over ``in_axis``, the output's over
``out_axis``; the tokens are sharded over data and z, and where activations are sequence-parallel also over the axis that
does not shard the features.

    forward    all-gather I over out_axis              nothing to gather if I is replicated
               O = I W^T on this rank's block          a part of a sum over in_axis
               reduce-scatter O over in_axis           all-reduce if O is replicated;
                                                       a chunk is in flight while the next is multiplied
    backward   all-gather dO over in_axis
               dI = dO W                               a part of a sum over out_axis
               reduce-scatter dI over out_axis         in flight while
               dW = dO^T I                             complete: no other rank holds the block

`colwise` layers go from y to x, `rowwise` layers from x to y: the output layout of the one is the input layout of the
other, so no activation ever changes its layout. A layer with an axis of None has that side unsharded. Weights on z and
data are the business of `weights/`: here the block is complete.

Attention works on complete sequences of some heads. There the second cut, too, is one of features: the outputs of q, k
and v are scattered by heads, and the output projection gathers heads. Where heads do not divide, each rank of the axis
has all of them.

Linears that read one input (q, k, v; gate, up) are one group: they are computed together at the first call of one of
them, and cost one collective each time. The function itself is in `product/linear_op.py`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fourfold.errors import UnsupportedError
from fourfold.mesh.axes import Axis
from fourfold.mesh.exchange import gather_for_all
from fourfold.mesh.grid import Grid
from fourfold.mesh.kept import block_results
from fourfold.mesh.reductions import sum_backward
from fourfold.parallel.dropout import Dropout, draw_for_shards
from fourfold.parallel.product.linear_op import sharded_product
from fourfold.parallel.product.product import Adapter, Product
from fourfold.parallel.product.traced_product import register, traced_product
from fourfold.parallel.sequence import REPLICATED, Cuts, ShapeProxy, Tokens
from fourfold.weights.api import read_weight
from fourfold.weights.overlap import Overlap

ADAPTER = "lora"  # the beginning of the names of its parameters, A first


class _Ready(threading.local):
    """Results that wait for the calls of the other members; one for each thread, because half-batches run in threads."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.version = -1
        self.results: dict[int, Tensor] = {}


class _Traced:
    """The same while Dynamo traces a block."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.results: list[Tensor | None] = []


class FusedLinearGroup:
    """Linears of one module that may read the same input.

    The first call of a member computes all of them; the others then take their result. A member that reads a different
    input in the first forward is removed from the group: the result is right either way, and cheaper afterwards.
    """

    def __init__(
        self,
        grid: Grid,
        in_axis: Axis | None,
        out_axis: Axis | None,
        overlap: Overlap,
        tokens: Tokens | None = None,
        *,
        defers: bool = False,
        float8: bool = False,
    ) -> None:
        self.defers, self.float8 = defers, float8
        self.grid, self.in_axis, self.out_axis, self.overlap = grid, in_axis, out_axis, overlap
        self.tokens = tokens
        self.members: list[Linear4D] = []
        self.omits_adapters = False  # `without_adapters`
        self._mine = _Ready()
        self._traced = _Traced()
        self._product: Product | None = None
        self._number = -1  # of the product as an operator
        self._operator: Product | None = None
        self.settled = False

    def __call__(self, member: Linear4D, input: Tensor) -> Tensor:
        if input.is_inference():
            # Such a tensor has no version that would tell whether it changed since another member read it.
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
        members = self._members()
        outputs = self._compute(input, members)
        if len(members) == 1:
            return outputs[0]
        mine.results = {id(m): o for m, o in zip(members, outputs, strict=True)}
        mine.input, mine.version = input, input._version
        return mine.results.pop(id(member))

    def _members(self) -> list[Linear4D]:
        """The members that are computed together. Those of the first forward, if that is what a recomputed block repeats."""
        results = block_results()
        if results is None:
            return self.members
        return results.as_before(self.members if self.settled else list(self.members))

    def traced(self, member: Linear4D, input: Tensor) -> Tensor:
        """The same in a block that is compiled, after a first forward: the product is one operator."""
        mine, members = self._traced, self.members
        place = members.index(member) if len(members) > 1 else 0
        if mine.input is not input or mine.results[place] is None:  # also if it is called twice
            own = input
            if self.tokens is not None:
                own = self.tokens.traced_own(input)
            weights = self._weights(members)
            shapes = [self.output_shape(own, m, self._product) for m in members]  # type: ignore[arg-type]
            mine.results = list(traced_product(own, self._number, shapes, weights))
            mine.input = input
        output = mine.results[place]
        assert output is not None
        mine.results[place] = None
        if all(result is None for result in mine.results):
            mine.input, mine.results = None, []
        return output

    def prepare_trace(self) -> None:
        """Name the product as an operator; the members are settled."""
        self._product = self._product or self._product_of(self.members)
        self._number, self._operator = register(self._product)

    def settle(self) -> None:
        """A forward is over: drop unused results; after the first, remove members that were never called."""
        mine = self._mine
        if not torch.is_inference_mode_enabled():
            if not self.settled and mine.results:
                for other in [m for m in self.members if id(m) in mine.results]:
                    self._remove(other)
            self.settled = True
        if mine.results:
            mine.results, mine.input = {}, None

    def _split(self, member: Linear4D) -> None:
        """``member`` reads a different input from the one whose results still wait."""
        mine = self._mine
        if id(member) in mine.results:
            self._remove(member)
        else:
            # It was served from the old input and is called again: a new pass, in which the waiting were never called.
            for other in [m for m in self.members if id(m) in mine.results]:
                self._remove(other)

    def _remove(self, member: Linear4D) -> None:
        self.members.remove(member)
        self._product = None
        self._mine.results.pop(id(member), None)
        alone = FusedLinearGroup(
            self.grid,
            self.in_axis,
            self.out_axis,
            self.overlap,
            self.tokens,
            defers=self.defers,
            float8=self.float8,
        )
        alone.members, alone.settled = [member], True
        member.group = alone

    def operands(self, input: Tensor, members: Sequence[Linear4D]) -> tuple[Tensor, Product, list[Tensor]]:
        """The input with the tokens that this rank should have of it, the product, and the weights of all members."""
        if members is not self.members:
            product = self._product_of(members)
        elif self._product is None:
            product = self._product = self._product_of(members)
        else:
            product = self._product
        input = self._own_tokens(input, members[0])
        for member in members:
            member.check_input(input)
        if self.omits_adapters:
            return input, replace(product, adapters=()), [w for m in members for w in m.local("weight")]
        return input, product, self._weights(members)

    def _weights(self, members: Sequence[Linear4D]) -> list[Tensor]:
        """Those of all members, then those of their adapters."""
        return [block for kind in ("weight", ADAPTER) for m in members for block in m.local(kind)]

    def output_shape(self, input: Tensor, member: Linear4D, product: Product) -> tuple[int, ...]:
        """The dims of a member's output before its features; -1: the tokens that this rank keeps."""
        is_local = member.cuts.leave == "tokens" and not (member.is_head and product.in_ranks == 1)
        if is_local or member.cuts.gathers_output:
            return (*[1] * (input.ndim - 2), -1)
        return tuple(input.shape[:-1]) if self.tokens is None else self.tokens.shape

    def _compute(self, input: Tensor, members: Sequence[Linear4D]) -> tuple[Tensor, ...]:
        input, product, weights = self.operands(input, members)
        shapes = [self.output_shape(input, member, product) for member in members]
        return sharded_product(input, product, shapes, weights, self._dropout_seed(product, members))

    def _dropout_seed(self, product: Product, members: Sequence[Linear4D]) -> int | None:
        """Drawn in every forward in training, also one that backward runs again: that has the same state of random numbers."""
        if not members[0].training or not any(a is not None and a.dropout for a in product.adapters):
            return None
        return draw_for_shards(self.grid, self.in_axis)

    def _product_of(self, members: Sequence[Linear4D]) -> Product:
        ends = list(itertools.accumulate(m.weight_count for m in members))
        return Product(
            self.grid.collectives,
            self.in_axis,
            self.out_axis,
            members[0].cuts.enter,
            tuple(m.cuts.leave for m in members),
            tuple(slice(end - m.weight_count, end) for end, m in zip(ends, members, strict=True)),
            members[0].transposed,
            self.overlap,
            self.grid.target,
            self.defers,
            self.float8,
            "+".join(m.name if i == 0 else m.name.rpartition(".")[2] for i, m in enumerate(members)),
            self._adapters(members, ends[-1]),
        )

    def _adapters(self, members: Sequence[Linear4D], first: int) -> tuple[Adapter | None, ...]:
        """``first``: the place of their weights."""
        found: list[Adapter | None] = []
        for member in members:
            if member.adapter_scale is None:
                found.append(None)
                continue
            end = first + 1 + member.weight_count
            found.append(Adapter(first, slice(first + 1, end), member.adapter_scale, member.adapter_dropout))
            first = end
        return tuple(found) if any(found) else ()

    def _own_tokens(self, input: Tensor, member: Linear4D) -> Tensor:
        """``input`` with the tokens that this rank should have of it."""
        if self.tokens is None:
            return input
        if isinstance(input, ShapeProxy):
            return input.own
        enter = member.cuts.enter
        if member.cuts.gathers_output or (enter == "tokens" and self.out_axis == "x"):
            return self.tokens.own(input, member.name)
        expected = self.tokens.count(self.out_axis if enter == "tokens" else None)
        rows = input.shape[:-1].numel()
        if rows != expected:
            raise UnsupportedError(
                f"{member.name} got {rows} tokens instead of the {expected} that it should have of the batch "
                f"{self.tokens.shape}, so the module before it does not work token by token; use activations='replicated'"
            )
        return input


class Linear4D(nn.Module):
    """A linear layer whose weight is a block on the grid; replaces `nn.Linear` and GPT-2's `Conv1D`.

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
        used_rows: slice | None = None,
        shared_columns: int = 0,
        dropout: Dropout | None = None,
        cuts: Cuts = REPLICATED,
        head: bool = False,
        adapter_scale: float | None = None,
        adapter_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.name, self.group, self.transposed = name, group, transposed
        self.cuts, self.is_head = cuts, head
        self.adapter_scale, self.adapter_dropout = adapter_scale, adapter_dropout
        self.in_features, self.out_features = in_features, out_features
        # Replicated key/value heads: all rows are here, this rank works with these.
        self._used_rows = used_rows
        # The last columns go to every x rank's heads, past the next colwise layer (rotary keys of latent attention).
        self._shared_columns = shared_columns
        self._dropout = dropout
        for key, parameter in parameters.items():
            self.register_parameter(key, parameter)
        self._weights = [key for key in parameters if key.startswith("weight")]
        self._biases = [key for key in parameters if key.startswith("bias")]
        self._adapter = [key for key in parameters if key.startswith(ADAPTER)]
        self.weight_count = len(self._weights)
        parts = group.grid.size(group.in_axis)
        if cuts.enter == "features":
            parts *= group.grid.size(group.out_axis)
        self._expected_features = in_features // parts
        group.members.append(self)

    @property
    def has_bias(self) -> bool:
        return bool(self._biases)

    def local(self, kind: str, axes: tuple[Axis, ...] = ()) -> list[Tensor]:
        """This rank's blocks of the weights, of the biases or of the adapter; their gradients are summed over ``axes``."""
        if kind == ADAPTER:
            return self._own_adapter()
        if self._used_rows is not None or self.cuts.gathers_output:
            # Each x rank uses, and has the gradient of, different rows of the same replicated weight; or all rows, for different tokens.
            axes = (*axes, "x")
        blocks = []
        for key in self._weights if kind == "weight" else self._biases:
            block = read_weight(self, key, axes, by_sibling=True)
            blocks.append(block if self._used_rows is None else block[self._used_rows])
        return blocks

    def _own_adapter(self) -> list[Tensor]:
        """A, then B for each weight; each rank of the other axis has a part of their gradients."""
        group = self.group
        blocks = []
        for number, key in enumerate(self._adapter):
            axis = group.in_axis if number else group.out_axis
            axes: tuple[Axis, ...] = () if axis is None else (axis,)
            if self.cuts.gathers_output:
                axes = (*axes, "x")
            if number == 0 or self._used_rows is None:
                blocks.append(read_weight(self, key, axes, by_sibling=True))
            else:
                blocks.append(read_weight(self, key, (*axes, "x"), by_sibling=True)[self._used_rows])
        return blocks

    def check_input(self, input: Tensor) -> None:
        if input.shape[-1] == self._expected_features:
            return
        group = self.group
        over = f"{group.in_axis}={group.grid.size(group.in_axis)}"
        if self.cuts.enter == "features":
            over += f" and {group.out_axis}={group.grid.size(group.out_axis)}"
        raise ValueError(
            f"{self.name} expects {self._expected_features} input features on each rank (its {self.in_features} over "
            f"{over}), got {input.shape[-1]}: the module before it does not keep the layout of its role; give that module "
            f"a role, or use {group.in_axis}=1"
        )

    def forward(self, input: Tensor) -> Tensor:
        if self._dropout is not None:
            self._dropout.leave()
        group, cuts = self.group, self.cuts
        output = group.traced(self, input) if torch.compiler.is_compiling() else group(self, input)
        if self._biases:
            biases = self._own_biases()
            output = output + (biases[0] if len(biases) == 1 else torch.cat(biases))
        if cuts.gathers_output:
            assert group.tokens is not None
            output = gather_for_all(output, group.grid, "x", output.ndim - 2, "activation", self.name)
            output = output.view(*group.tokens.shape, output.shape[-1])
        if self._used_rows is not None and group.float8:
            output = self._of_one_rank(output, self._used_rows)
        if self._shared_columns:
            own, shared = output.split(
                [output.shape[-1] - self._shared_columns, self._shared_columns], dim=-1
            )
            shared = sum_backward(shared, group.grid.collectives, "x", "activation", self.name)
            output = torch.cat([own, shared], dim=-1)
        if cuts.used_columns is not None:
            output = sum_backward(output, group.grid.collectives, group.in_axis, "shared", self.name)
            output = output[..., cuts.used_columns]
        if self._dropout is not None:
            # Heads differ between y ranks also where their keys and values do not.
            cut_twice = cuts.leave != "whole" or cuts.used_columns is not None
            self._dropout.enter(group.out_axis, group.in_axis if cut_twice else None)
        return output

    def _of_one_rank(self, output: Tensor, rows: slice) -> Tensor:
        """Backward gets the whole gradient of a replicated key/value head, on the first of the x ranks that share it.

        Each has a part of it. A product adds up what it makes of the parts, but in float8 it is not that of their sum.
        """
        grid = self.group.grid
        ranks = grid.x * (rows.stop - rows.start) // self.out_features
        if grid.coordinate("x") % ranks:
            output = output.detach() + 0 * output
        all_heads = nn.functional.pad(output, (rows.start, self.out_features - rows.stop))
        all_heads = sum_backward(all_heads, grid.collectives, "x", "shared", self.name)
        return all_heads[..., rows].clone()

    def _own_biases(self) -> list[Tensor]:
        """Each rank of ``in_axis`` adds them to different tokens, or adds a part of them to its own features."""
        grid, axis = self.group.grid, self.group.in_axis
        if axis is None or self.cuts.leave == "whole":
            return self.local("bias")
        biases = self.local("bias", (axis,))
        if self.cuts.leave == "features":
            biases = [b.chunk(grid.size(axis))[grid.coordinate(axis)] for b in biases]
        return biases

    def extra_repr(self) -> str:
        axes = f"{self.group.in_axis} -> {self.group.out_axis}"
        float8 = ", float8" if self.group.float8 else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, {axes}{float8}"


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as it would without its adapters of LoRA, and without gradients."""
    groups = {module.group for module in model.modules() if isinstance(module, Linear4D)}
    for group in groups:
        group.omits_adapters = True
    try:
        with torch.no_grad():  # a backward would come after the adapters are back
            yield
    finally:
        for group in groups:
            group.omits_adapters = False
