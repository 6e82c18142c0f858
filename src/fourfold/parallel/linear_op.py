"""One sharded product as one autograd function: gather, multiply, reduce.

O = I W^T for the weights of one or several linears that read the same input. The features of I are sharded over
``in_axis``, those of O over ``out_axis``. The other axis of each activation shards its tokens, or a second time its
features, or nothing:

    cut         an activation over its second axis         to multiply it     after the product
    tokens      each rank has some of the tokens           all-gather         reduce-scatter
    features    each rank has some of the features         all-gather         reduce-scatter
    whole       each rank has all of it                    nothing            all-reduce

Activations that are replicated are the case in which every cut is "whole". An all-reduce sends as many bytes as a
reduce-scatter and an all-gather, so all cuts cost the same traffic.

In float8 (`float8/operands.py`) the operands of O and dI are quantised after they are gathered; the rest is the same.

The function is complete when it returns; its backward may leave the gradient of the input in flight (`mesh/reductions.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Pending, Purpose
from fourfold.mesh.kept import block_results
from fourfold.mesh.reductions import await_gradient, put_in_flight
from fourfold.parallel.float8.operands import Float8, multiply, operands_of_gradient, operands_of_output
from fourfold.weights.overlap import Overlap

Cut = Literal["tokens", "features", "whole"]
_Matrix = Tensor | Float8
_A = TypeVar("_A", bound=_Matrix)
_B = TypeVar("_B", bound=_Matrix)


@dataclass(frozen=True)
class Product:
    """Which product: the axes, the cuts, and which weights each member (a linear) has."""

    collectives: Collectives
    in_axis: Axis | None
    out_axis: Axis | None
    # How the input is cut over out_axis, and the output of each member over in_axis.
    enter: Cut
    leaves: tuple[Cut, ...]
    # The weights of each member, as a slice of all of them; stored [in, out] if transposed.
    spans: tuple[slice, ...]
    transposed: bool
    overlap: Overlap
    target: str
    # Return the input's gradient in flight: streamed weights send the gradients of the weights before it is waited for.
    defers: bool
    float8: bool
    name: str
    is_traced: bool = False  # in the graph of a compiled block

    @functools.cached_property
    def in_ranks(self) -> int:
        return 1 if self.in_axis is None else self.collectives.size(self.in_axis)

    @functools.cached_property
    def out_ranks(self) -> int:
        return 1 if self.out_axis is None else self.collectives.size(self.out_axis)

    @functools.cached_property
    def together(self) -> list[tuple[Cut, list[int]]]:
        """Members whose outputs are cut in the same way: one collective serves them all."""
        found: dict[Cut, list[int]] = {}
        for member, leave in enumerate(self.leaves):
            found.setdefault(leave, []).append(member)
        return list(found.items())

    @functools.cached_property
    def gathers_gradients(self) -> bool:
        return self.in_ranks > 1 and any(leave != "whole" for leave in self.leaves)

    def gather(self, own: Tensor, axis: Axis | None, cut: Cut, purpose: Purpose) -> tuple[Tensor, Pending]:
        """All of an activation: [1, tokens, features], or [ranks, tokens, features of one rank] by features."""
        if axis is None or cut == "whole" or (ranks := self.collectives.size(axis)) == 1:
            return own.unsqueeze(0), Pending()
        parts = ranks if cut == "features" else 1
        full = own.new_empty(parts, own.shape[0] * ranks // parts, own.shape[1])
        return full, self.collectives.all_gather(full, own.contiguous(), axis, purpose, module=self.name)

    def reduce(self, own: Tensor, parts: Tensor, axis: Axis | None, cut: Cut) -> Pending:
        """The sums of ``parts`` that are this rank's, into ``own``; in place where each rank has all of them."""
        if axis is None or cut == "whole" or self.collectives.size(axis) == 1:
            return self.collectives.all_reduce(parts, axis, "activation", module=self.name)
        return self.collectives.reduce_scatter(own, parts, axis, "activation", module=self.name)

    def shared_scales(self, axis: Axis | None) -> Callable[[Tensor], Pending]:
        """Reduces largest magnitudes, in place, of rows that the ranks of an axis have parts of."""
        return lambda largest: self.collectives.all_reduce(
            largest, axis, "scale", dist.ReduceOp.MAX, module=self.name
        )

    def widths(self, weights: Sequence[Tensor]) -> list[int]:
        """The number of output features of each member."""
        dim = 1 if self.transposed else 0
        return [sum(weight.shape[dim] for weight in weights[span]) for span in self.spans]

    def blocks(self, weights: Sequence[Tensor], member: int) -> list[Tensor]:
        """A member's weights as [out, in]."""
        own = weights[self.spans[member]]
        return [w.t() for w in own] if self.transposed else list(own)


class _ShardedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        product: Product,
        shapes: Sequence[tuple[int, ...]],
        deferred: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an output that nobody used has no gradient to gather
        results = block_results()
        ctx.product, ctx.input_shape, ctx.deferred = product, input.shape, deferred
        ctx.keeps_input = product.overlap.keep_inputs
        own = input.reshape(-1, input.shape[-1])
        known = results.known(input.device) if results is not None else None
        full = gathered_input(product, own) if known is None or ctx.keeps_input else own
        # Not views of shared memory, which a model's code could not change in place.
        outputs = known or [output.data for output in _computed(product, full, shapes, weights)]
        if results is not None and known is None:
            ctx.result_index = results.keep(outputs)
        ctx.save_for_backward(full if ctx.keeps_input else own, *weights)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        full, *weights = ctx.saved_tensors
        input_gradient, pending, weight_gradients = product_gradients(
            ctx.product,
            full,
            weights,
            gradients,
            ctx.input_shape,
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[4:],
            keeps_input=ctx.keeps_input,
        )
        if input_gradient is not None and ctx.deferred:
            input_gradient = put_in_flight(input_gradient, pending)
        else:
            pending.wait([gradient for gradient in weight_gradients if gradient is not None])
        return (input_gradient, None, None, None, *weight_gradients)


def product_gradients(
    product: Product,
    full: Tensor,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    input_shape: torch.Size,
    wants_input: bool,
    wants_weights: Sequence[bool],
    *,
    keeps_input: bool,
) -> tuple[Tensor | None, Pending, list[Tensor | None]]:
    """(the gradient of the input, which is complete after a wait, those of the weights); ``full`` is gathered if it was kept."""
    overlap = product.overlap
    pending_input = Pending()
    if not keeps_input:
        # In flight during dI's matmul.
        full, pending_input = product.gather(full, product.out_axis, product.enter, "regather")
        if not overlap.backward:
            pending_input.wait()

    # dI = dO W: a part of a sum over out_axis.
    arrived = _gathered_gradients(product, gradients)
    input_gradient: Tensor | None = None
    pending = Pending()
    if wants_input and arrived:
        parts = _multiplied_back(product, full, arrived, weights)
        is_cut = product.enter != "whole" and product.out_ranks > 1
        input_gradient = parts.new_empty(input_shape) if is_cut else parts
        pending = product.reduce(input_gradient, parts, product.out_axis, product.enter)
        if not overlap.backward:
            pending.wait()
        input_gradient = input_gradient.view(input_shape)

    # dW = dO^T I: complete, because only this rank holds the block; meanwhile dI is reduced.
    pending_input.wait()
    weight_gradients: list[Tensor | None] = [None] * len(weights)
    for member, gradient in arrived.items():
        span = product.spans[member]
        if any(wants_weights[span]):
            made = [torch.empty_like(w) for w in weights[span]]
            weight_gradients[span] = made
            out_by_in = [m.t() for m in made] if product.transposed else made
            for out, i, block in _terms(gradient, out_by_in, len(full)):
                torch.mm(out.t(), full[i], out=block)
    return input_gradient, pending, weight_gradients


def sharded_product(
    input: Tensor, product: Product, shapes: Sequence[tuple[int, ...]], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The output of each member, its tokens in the dims of ``shapes``."""
    interleaving = product.collectives.interleaving
    deferred = product.out_ranks > 1 and (product.defers or interleaving is not None)
    if deferred:
        input = await_gradient(input, product.collectives)
    outputs = cast(
        tuple[Tensor, ...],
        _ShardedProduct.apply(input, product, shapes, deferred, *weights),  # type: ignore[no-untyped-call]
    )
    results = block_results()
    if results is not None and results.is_again and results.is_empty:
        # Backward needs more than the input: the block has put something that it computed from the output elsewhere.
        results.is_empty = False
        with torch.no_grad():
            full = gathered_input(product, input.reshape(-1, input.shape[-1]))
            for output, values in zip(outputs, _computed(product, full, shapes, weights), strict=True):
                output.copy_(values)
    if interleaving is None or not product.gathers_gradients:
        return outputs
    interleaving.begin_section()
    return cast(tuple[Tensor, ...], _GatherGradients.apply(product, *outputs))  # type: ignore[no-untyped-call]


# -- outputs ----------------------------------------------------------------------------------------------------------


def gathered_input(product: Product, own: Tensor) -> Tensor:
    interleaving = product.collectives.interleaving
    full, pending = product.gather(own, product.out_axis, product.enter, "activation")
    if interleaving is not None and product.enter != "whole" and product.out_ranks > 1:
        interleaving.switch()
    pending.wait()
    return full


def multiplied(product: Product, full: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in flat memory: of all members that are cut alike together, or of each, where nothing is sent (`outputs_of`)."""
    interleaving = product.collectives.interleaving
    made: list[tuple[list[Tensor], list[_Chunk]]] = []
    in_flight: list[Pending] = []
    blocks = [product.blocks(weights, member) for member in range(len(product.spans))]
    left: _Matrix = full
    right: Sequence[Sequence[_Matrix]] = blocks
    if product.float8:
        left, right = operands_of_output(full, blocks, product.shared_scales(product.in_axis))
    for leave, members in product.together:
        widths = [sum(block.shape[0] for block in right[m]) for m in members]
        memory, chunks = _outputs(product, members, widths, leave, full)
        # A chunk of the outputs is reduced while the next is multiplied.
        for chunk in chunks:
            for member, rows, out_memory in chunk.products:
                # [input parts, groups of tokens, rows of each group, features]
                read = left.unflatten(1, (out_memory.shape[1], -1))[:, :, rows]
                for out, i, block in _terms(out_memory, right[member], len(full)):
                    _multiply(read[i], block.t(), out, first=i == 0)
            if chunk.apart:
                torch.cat(chunk.apart, dim=1, out=chunk.parts)
            in_flight.append(product.reduce(chunk.own, chunk.parts, product.in_axis, leave))
        made.append((memory, chunks))
    if interleaving is not None and product.in_ranks > 1:
        interleaving.switch()
    for pending in in_flight:
        pending.wait()
    found: list[Tensor] = []
    for memory, chunks in made:
        if memory:
            found += memory
        else:
            found.append(torch.cat([c.own for c in chunks]) if len(chunks) > 1 else chunks[0].own)
    return found


def _multiplied_back(
    product: Product, full: Tensor, gradients: Mapping[int, Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """dO W of all members, like ``full``."""
    parts = torch.empty_like(full, memory_format=torch.contiguous_format)
    each, written = _each(parts), set[int]()
    blocks = {member: product.blocks(weights, member) for member in gradients}
    left: Mapping[int, _Matrix] = gradients
    right: Mapping[int, Sequence[_Matrix]] = blocks
    if product.float8:
        of_rows, of_columns = product.shared_scales(product.out_axis), product.shared_scales(product.in_axis)
        left, right = operands_of_gradient(gradients, blocks, of_rows, of_columns)
    for member in gradients:
        for out, i, block in _terms(left[member], right[member], len(full)):
            _multiply(out, block, each[i], first=i not in written, is_gradient=True)
            written.add(i)
    return parts


def outputs_of(
    product: Product,
    memory: Sequence[Tensor],
    widths: Sequence[int],
    tokens: int,
    shapes: Sequence[tuple[int, ...]],
) -> list[Tensor]:
    """The output of each member in the memory of `multiplied`; ``widths`` are all features of each, ``tokens`` those of the input."""
    outputs: dict[int, Tensor] = {}
    left = list(memory)
    for leave, members in product.together:
        if product.in_ranks == 1:
            for member in members:
                outputs[member] = left.pop(0).view(*shapes[member], widths[member])
            continue
        rows = tokens // product.in_ranks if leave == "tokens" else tokens
        columns = [widths[m] // product.in_ranks if leave == "features" else widths[m] for m in members]
        together = left.pop(0)
        parts = together.split([rows * width for width in columns]) if len(members) > 1 else [together]
        for member, part, width in zip(members, parts, columns, strict=True):
            own = part.view(*shapes[member], width)
            # Attention keeps v, and what it makes of q and k: v is not to keep the memory that all three share.
            outputs[member] = own.clone() if leave == "features" and len(product.leaves) > 1 else own
    return [outputs[member] for member in range(len(product.leaves))]


_Span = tuple[int, int, int, int]  # a member, its first row, the row after its last, columns


def _size(spans: Sequence[_Span]) -> int:
    return sum((last - first) * width for _, first, last, width in spans)


@dataclass(frozen=True)
class _Chunk:
    """What one collective reduces of the members' outputs."""

    own: Tensor
    # [ranks, own]: this rank's parts of what each of them keeps.
    parts: Tensor
    # (member, which rows of each group of tokens, where to write [parts, groups, rows, features]): one for each member.
    # Where ranks keep tokens and a chunk has some of each rank's, the tokens of a rank are a group; otherwise all are one.
    products: list[tuple[int, slice, Tensor]]
    # In a graph, memory of each of several members; they are put together in ``parts``.
    apart: tuple[Tensor, ...] = ()


def _outputs(
    product: Product, members: Sequence[int], widths: Sequence[int], leave: Cut, full: Tensor
) -> tuple[list[Tensor], list[_Chunk]]:
    """Memory for what a rank keeps of the outputs of ``members``, which are cut alike; and the same in chunks.

    In a graph each chunk has memory of its own, and there is none for all: to write a part of a tensor, a graph copies all of it.
    """
    tokens = full.shape[1]
    if product.in_ranks == 1:
        # Nothing is sent. Separate memory, so that keeping one output (v in attention) does not keep the others.
        apart = [_empty(tokens * width, full) for width in widths]
        return apart, [
            _Chunk(out, out.view(1, -1), [(member, slice(None), out.view(1, 1, tokens, width))])
            for member, out, width in zip(members, apart, widths, strict=True)
        ]
    ranks = 1 if leave == "whole" else product.in_ranks
    rows = tokens // ranks if leave == "tokens" else tokens
    columns = [width // ranks if leave == "features" else width for width in widths]
    count = product.overlap.chunks_of(
        ranks * rows * sum(columns), full.element_size(), full.shape[-1], product.target
    )
    spans = _divide(members, columns, rows, count)
    if product.is_traced:
        return [], [_chunk_apart(each, ranks, rows, leave, full) for each in spans]
    parts = _empty(ranks * rows * sum(columns), full)
    own = _empty(rows * sum(columns), full) if ranks > 1 else parts
    chunks, end = [], 0
    for each in spans:
        start, end = end, end + _size(each)
        memory = parts[ranks * start : ranks * end].view(ranks, end - start)
        chunks.append(_Chunk(own[start:end], memory, _products(memory, each, rows, leave)))
    return [own], chunks


def _chunk_apart(spans: Sequence[_Span], ranks: int, rows: int, leave: Cut, full: Tensor) -> _Chunk:
    parts = _empty(ranks * _size(spans), full).view(ranks, -1)
    own = _empty(_size(spans), full) if ranks > 1 else parts.view(-1)
    if len(spans) == 1:
        return _Chunk(own, parts, _products(parts, spans, rows, leave))
    apart = tuple(_empty(ranks * _size([span]), full).view(ranks, -1) for span in spans)
    products = [_products(memory, [span], rows, leave)[0] for memory, span in zip(apart, spans, strict=True)]
    return _Chunk(own, parts, products, apart)


def _empty(size: int, like: Tensor) -> Tensor:
    """Not `like.new_empty`: a graph that recomputes a block would gather the input for it again."""
    return torch.empty(size, dtype=like.dtype, device=like.device)


def _divide(members: Sequence[int], columns: Sequence[int], rows: int, count: int) -> list[list[_Span]]:
    """What each chunk has: all in one, or several of each member."""
    if count == 1:
        return [[(m, 0, rows, width) for m, width in zip(members, columns, strict=True)]]
    found = []
    for m, width in zip(members, columns, strict=True):
        size = -(-rows // max(1, round(count * width / sum(columns))))
        found += [[(m, start, min(start + size, rows), width)] for start in range(0, rows, size)]
    return found


def _products(
    memory: Tensor, spans: Sequence[_Span], rows: int, leave: Cut
) -> list[tuple[int, slice, Tensor]]:
    found: list[tuple[int, slice, Tensor]] = []
    offset = 0
    for m, first, last, width in spans:
        size = (last - first) * width
        out = memory[:, offset : offset + size].unflatten(1, (last - first, width))
        offset += size
        if leave != "tokens":
            found.append((m, slice(first, last), out.unsqueeze(1)))
        elif last - first == rows and out.is_contiguous():
            found.append((m, slice(None), out.view(1, 1, -1, width)))
        else:
            found.append((m, slice(first, last), out.unsqueeze(0)))
    return found


def _computed(
    product: Product, full: Tensor, shapes: Sequence[tuple[int, ...]], weights: Sequence[Tensor]
) -> list[Tensor]:
    return outputs_of(
        product, multiplied(product, full, weights), product.widths(weights), full.shape[1], shapes
    )


# -- gradients of the outputs -----------------------------------------------------------------------------------------


def _start_gathering(
    product: Product, gradients: Sequence[Tensor | None]
) -> dict[int, tuple[Tensor, Pending]]:
    """[1, tokens, features], or [ranks, tokens, features of one] by features; one collective for those cut alike."""
    found: dict[int, tuple[Tensor, Pending]] = {}
    for leave, members in product.together:
        own = {m: g.reshape(-1, g.shape[-1]) for m in members if (g := gradients[m]) is not None}
        if len(own) < 2 or leave == "whole" or product.in_axis is None or product.in_ranks == 1:
            for member, flat in own.items():
                found[member] = product.gather(flat, product.in_axis, leave, "activation")
            continue
        flats = list(own.values())
        packed = torch.cat([flat.reshape(-1) for flat in flats])
        full = packed.new_empty(product.in_ranks, packed.numel())
        pending = product.collectives.all_gather(
            full, packed, product.in_axis, "activation", module=product.name
        )
        parts = full.split([flat.numel() for flat in flats], dim=1)
        for (member, flat), part in zip(own.items(), parts, strict=True):
            found[member] = part.unflatten(1, flat.shape), pending
    if not product.overlap.backward:
        for _, pending in found.values():
            pending.wait()
    return found


def _gathered_gradients(product: Product, gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
    started: dict[int, tuple[Tensor, Pending]] = {}
    for gradient in gradients:
        if gradient is not None:
            started |= gradient.__dict__.pop("_gathering", {})
    started = started or _start_gathering(product, gradients)
    arrived = {}
    for member, (gradient, pending) in started.items():
        pending.wait()
        if product.leaves[member] == "tokens" and len(gradient) > 1:
            gradient = gradient.reshape(1, -1, gradient.shape[-1])
        arrived[member] = gradient
    return arrived


class _GatherGradients(torch.autograd.Function):
    """Follows the product, so precedes it in backward: there the gradients of its outputs start to be gathered.

    Used only while two half-batches alternate: autograd runs the other half until the product's own backward.
    """

    @staticmethod
    def forward(ctx: Any, product: Product, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.product = product
        # Not views, which a model's code could not change in place.
        return tuple(output.data for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = next((g for g in gradients if g is not None), None)
        if given is not None:
            given._gathering = _start_gathering(ctx.product, gradients)  # type: ignore[attr-defined]
        return (None, *gradients)


# -- the matmuls ------------------------------------------------------------------------------------------------------


def _terms(parts: _A, blocks: Sequence[_B], terms: int) -> Iterator[tuple[_A, int, _B]]:
    """(columns of an output, which part of the input, the piece of a weight between them).

    One for each weight of a member, unless the output or the input is cut by its features.
    """
    if len(parts) == 1 and len(blocks) == 1 and terms == 1:
        yield _each(parts)[0], 0, blocks[0]
        return
    of_parts: Any = zip(*(b.chunk(len(parts)) for b in blocks), strict=True)
    for part, rows in zip(_each(parts), of_parts, strict=True):
        columns: Any = part.split([r.shape[0] for r in rows], dim=-1)
        for column, row in zip(columns, rows, strict=True):
            for i, piece in enumerate(row.chunk(terms, dim=1)):
                yield column, i, piece


def _each(parts: _A) -> Sequence[_A]:
    """The parts, to read or to write. A view of all of the memory, where there is one: a graph copies into a part of it."""
    found: Any = parts
    if isinstance(parts, Float8):
        return [found[i] for i in range(len(parts))]
    return [found.squeeze(0)] if len(parts) == 1 else found.unbind()


def _multiply(a: _Matrix, b: _Matrix, out: Tensor, *, first: bool, is_gradient: bool = False) -> None:
    """``out = a b``, or add to what the first product has written; a and out may be several groups of rows."""
    if isinstance(a, Float8):
        assert isinstance(b, Float8)
        for rows, into in [(a, out)] if out.ndim == 2 else [(a[i], out[i]) for i in range(len(a))]:
            multiply(rows, b, into, first=first, is_gradient=is_gradient)
        return
    assert isinstance(b, Tensor)
    if a.ndim == 3 and len(a) > 1:
        by_group = b.expand(len(a), -1, -1)
        if first:
            torch.bmm(a, by_group, out=out)
        else:
            torch.baddbmm(out, a, by_group, out=out)
        return
    a, out = (a.squeeze(0), out.squeeze(0)) if a.ndim == 3 else (a, out)
    if first:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, out=out)
