"""One sharded product as one autograd function: gather, multiply, reduce.

O = I W^T for the weights of one or several linears that read the same input. `product.py` says how its activations are cut, and what
is gathered and reduced; `outputs.py` has the memory of the outputs.

In float8 (`float8/operands.py`) the operands of O and dI are quantised after they are gathered; the rest is the same.

An adapter (`low_rank.py`) adds s (I A^T) B^T to this rank's part of O before it is reduced, and s (dO B) A to its part of dI.

The function is complete when it returns; its backward may leave the gradient of the input in flight, and with two half-batches the
gradients of the weights to be computed (`mesh/reductions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fourfold.mesh.collectives import Pending
from fourfold.mesh.kept import block_results
from fourfold.mesh.reductions import await_gradient, put_in_flight
from fourfold.parallel.float8.operands import Float8, multiply, operands_of_gradient, operands_of_output
from fourfold.parallel.product.low_rank import (
    add_input_gradient,
    each,
    low_rank,
    low_rank_gradient,
    mask,
    terms,
)
from fourfold.parallel.product.low_rank import gradients as gradients_of
from fourfold.parallel.product.outputs import Outputs, memory_of, outputs_of
from fourfold.parallel.product.product import Adapter, Blocks, Product

_Matrix = Tensor | Float8
_A = TypeVar("_A", bound=_Matrix)
_B = TypeVar("_B", bound=_Matrix)
_ByMember = Blocks | Sequence[Sequence[_Matrix]] | Mapping[int, Sequence[_Matrix]]


class _ShardedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        product: Product,
        shapes: Sequence[tuple[int, ...]],
        deferred: bool,
        seed: int | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an output that nobody used has no gradient to gather
        results = block_results()
        ctx.product, ctx.input_shape, ctx.deferred, ctx.seed = product, input.shape, deferred, seed
        ctx.postpones_weights = deferred and product.collectives.interleaving is not None
        ctx.keeps_input = product.overlap.keep_inputs
        own = input.reshape(-1, input.shape[-1])
        known = results.known(input.device) if results is not None else None
        full = gathered_input(product, own) if known is None or ctx.keeps_input else own
        # Not views of shared memory, which a model's code could not change in place.
        outputs = known or [output.data for output in _computed(product, full, shapes, weights, seed)]
        if results is not None and known is None:
            ctx.result_index = results.keep(outputs)
        ctx.save_for_backward(full if ctx.keeps_input else own, *weights)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        full, *weights = ctx.saved_tensors
        input_gradient, pending, of_weights = product_gradients(
            ctx.product,
            full,
            weights,
            gradients,
            ctx.input_shape,
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[5:],
            keeps_input=ctx.keeps_input,
            seed=ctx.seed,
        )
        if input_gradient is not None and ctx.postpones_weights:
            are_wanted = ctx.needs_input_grad[5:]
            # Autograd wants tensors of these shapes here. Nobody reads them.
            stand_ins = [
                w.new_empty(()).expand_as(w) if is_wanted else None
                for w, is_wanted in zip(weights, are_wanted, strict=True)
            ]
            input_gradient = put_in_flight(
                input_gradient, pending, lambda: [*compress(of_weights(), are_wanted)]
            )
            return (input_gradient, None, None, None, None, *stand_ins)
        weight_gradients = of_weights()
        if input_gradient is not None and ctx.deferred:
            input_gradient = put_in_flight(input_gradient, pending)
        else:
            pending.wait([gradient for gradient in weight_gradients if gradient is not None])
        return (input_gradient, None, None, None, None, *weight_gradients)


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
    seed: int | None,
) -> tuple[Tensor | None, Pending, Callable[[], list[Tensor | None]]]:
    """(the gradient of the input, which is complete after a wait; what computes those of the weights); ``full`` is gathered if it was kept."""
    overlap = product.overlap
    pending_input = Pending()
    if not keeps_input:
        # In flight during dI's matmul.
        full, pending_input = product.gather(full, product.out_axis, product.enter, "regather")
        if not overlap.backward:
            pending_input.wait()

    # dI = dO W: a part of a sum over out_axis.
    arrived = _gathered_gradients(product, gradients)
    low_gradients = {
        member: low_rank_gradient(adapter, gradient, weights)
        for member, gradient in arrived.items()
        if (adapter := product.adapter(member)) is not None
    }
    input_gradient: Tensor | None = None
    pending = Pending()
    if wants_input and arrived:
        parts = _multiplied_back(product, full, arrived, weights)
        for member, low in low_gradients.items():
            adapter = cast(Adapter, product.adapter(member))
            add_input_gradient(adapter, parts, low, weights, mask(adapter, member, parts, seed))
        is_cut = product.enter != "whole" and product.out_ranks > 1
        input_gradient = parts.new_empty(input_shape) if is_cut else parts
        pending = product.reduce(input_gradient, parts, product.out_axis, product.enter)
        if not overlap.backward:
            pending.wait()
        input_gradient = input_gradient.view(input_shape)

    def of_weights() -> list[Tensor | None]:
        # dW = dO^T I: complete, because only this rank holds the block; meanwhile dI is reduced.
        pending_input.wait()
        weight_gradients: list[Tensor | None] = [None] * len(weights)
        for member, gradient in arrived.items():
            span = product.spans[member]
            if any(wants_weights[span]):
                made = [torch.empty_like(w) for w in weights[span]]
                weight_gradients[span] = made
                out_by_in = [m.t() for m in made] if product.transposed else made
                for out, i, block in terms(gradient, out_by_in, len(full)):
                    torch.mm(out.t(), full[i], out=block)
            if member in low_gradients:
                adapter = cast(Adapter, product.adapter(member))
                kept = mask(adapter, member, full, seed)
                weight_gradients[adapter.a], weight_gradients[adapter.b] = gradients_of(
                    adapter, full, gradient, low_gradients[member], weights, kept
                )
        return weight_gradients

    return input_gradient, pending, of_weights


def sharded_product(
    input: Tensor,
    product: Product,
    shapes: Sequence[tuple[int, ...]],
    weights: Sequence[Tensor],
    seed: int | None = None,
) -> tuple[Tensor, ...]:
    """The output of each member, its tokens in the dims of ``shapes``; ``seed``: of the dropout of adapters."""
    interleaving = product.collectives.interleaving
    deferred = product.out_ranks > 1 and (product.defers or interleaving is not None)
    if deferred and input.requires_grad:  # otherwise the gradients of weights would ask for one of the input
        # Meanwhile the gradients of the weights are computed; those of a half-batch, while the other half sends, too.
        postponed = [w for w in weights if w.requires_grad] if interleaving is not None else []
        input, *awaited = await_gradient(input, product.collectives, postponed)
        by_weight = dict(zip(map(id, postponed), awaited, strict=True))
        weights = [by_weight.get(id(w), w) for w in weights]
    outputs = cast(
        tuple[Tensor, ...],
        _ShardedProduct.apply(input, product, shapes, deferred, seed, *weights),  # type: ignore[no-untyped-call]
    )
    results = block_results()
    if results is not None and results.is_again and results.is_empty:
        # Backward needs more than the input: the block has put something that it computed from the output elsewhere.
        results.is_empty = False
        with torch.no_grad():
            full = gathered_input(product, input.reshape(-1, input.shape[-1]))
            for output, values in zip(outputs, _computed(product, full, shapes, weights, seed), strict=True):
                output.copy_(values)
    if interleaving is None or not product.gathers_gradients:
        return outputs
    interleaving.begin_section()
    return cast(tuple[Tensor, ...], _GatherGradients.apply(product, *outputs))  # type: ignore[no-untyped-call]


# -- outputs ----------------------------------------------------------------------------------------------------------


def gathered_input(product: Product, own: Tensor) -> Tensor:
    full, pending = product.gather(own, product.out_axis, product.enter, "activation")
    product.collectives.wait(pending, in_turns=product.enter != "whole" and product.out_ranks > 1)
    return full


def multiplied(
    product: Product, full: Tensor, weights: Sequence[Tensor], seed: int | None = None
) -> list[Tensor]:
    """The outputs in flat memory: of all members that are cut alike together, or of each, where nothing is sent (`outputs_of`)."""
    interleaving = product.collectives.interleaving
    made: list[Outputs] = []
    in_flight: list[Pending] = []
    blocks, widths_of = Blocks(product, weights, full.dtype), product.widths(weights)
    low_ranks = [
        None
        if (adapter := product.adapter(member)) is None
        else low_rank(adapter, full, weights, mask(adapter, member, full, seed))
        for member in range(len(product.spans))
    ]
    left: _Matrix = full
    right: _ByMember = blocks
    if product.float8:
        every = [product.blocks(weights, member, full.dtype) for member in range(len(product.spans))]
        left, right = operands_of_output(full, every, product.shared_scales(product.in_axis))
    for leave, members in product.together:
        widths = [widths_of[m] for m in members]
        outputs = memory_of(product, members, widths, leave, full)
        # A chunk of the outputs is reduced while the next is multiplied.
        for chunk in outputs.chunks:
            for member, rows, out_memory in chunk.products:
                # [input parts, groups of tokens, rows of each group, features]
                read = left.unflatten(1, (out_memory.shape[1], -1))[:, :, rows]
                _multiply_by_each(read, right[member], out_memory)
                if (low := low_ranks[member]) is not None:
                    read_low = low.unflatten(0, (out_memory.shape[1], -1))[:, rows]
                    adapter = cast(Adapter, product.adapter(member))
                    for out, _, block in terms(out_memory, weights[adapter.b], 1):
                        _multiply(read_low, block.t(), out, first=False)
            chunk.put_together()
            in_flight.append(product.reduce(chunk.own, chunk.parts, product.in_axis, leave))
        made.append(outputs)
    if interleaving is not None and product.in_ranks > 1:
        interleaving.switch()
    for pending in in_flight:
        pending.wait()
    return [kept for outputs in made for kept in outputs.kept()]


def _multiplied_back(
    product: Product, full: Tensor, gradients: Mapping[int, Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """dO W of all members, like ``full``."""
    parts = torch.empty_like(full, memory_format=torch.contiguous_format)
    into, written = each(parts), set[int]()
    left: Mapping[int, _Matrix] = gradients
    right: _ByMember = Blocks(product, weights, full.dtype)
    if product.float8:
        blocks = {member: product.blocks(weights, member, full.dtype) for member in gradients}
        of_rows, of_columns = product.shared_scales(product.out_axis), product.shared_scales(product.in_axis)
        left, right = operands_of_gradient(gradients, blocks, of_rows, of_columns)
    for member in gradients:
        _multiply_back_by_each(left[member], right[member], into, written)
    return parts


# Functions of their own, so that the numbers of a packed weight are gone when those of the next are made.
def _multiply_by_each(read: _Matrix, blocks: Sequence[_Matrix], out_memory: Tensor) -> None:
    for out, i, block in terms(out_memory, blocks, len(read)):
        _multiply(read[i], block.t(), out, first=i == 0)


def _multiply_back_by_each(
    gradient: _Matrix, blocks: Sequence[_Matrix], into: Sequence[Tensor], written: set[int]
) -> None:
    for out, i, block in terms(gradient, blocks, len(into)):
        _multiply(out, block, into[i], first=i not in written, is_gradient=True)
        written.add(i)


def _computed(
    product: Product,
    full: Tensor,
    shapes: Sequence[tuple[int, ...]],
    weights: Sequence[Tensor],
    seed: int | None,
) -> list[Tensor]:
    return outputs_of(
        product, multiplied(product, full, weights, seed), product.widths(weights), full.shape[1], shapes
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
