"""The sharded product as an operator of PyTorch, for blocks that are compiled: one node of the graph, complete when it returns.

What overlaps inside the product still does: chunks of the outputs, the gradient of the input with those of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fourfold.parallel.linear_op import Product, gathered_input, multiplied, outputs_of, product_gradients

_products: WeakValueDictionary[int, Product] = WeakValueDictionary()
_numbers = itertools.count()


def register(product: Product) -> tuple[int, Product]:
    """A number for a product, the same for those of blocks that are alike, so that they share a graph; valid while that product is held."""
    parts = ["*" if part.isdecimal() else part for part in product.name.split(".")]
    alike = replace(product, name=".".join(parts), defers=False)
    for number, known in _products.items():
        if known == alike:
            return number, known
    number = next(_numbers)
    _products[number] = alike
    return number, alike


def traced_product(
    input: Tensor,
    product: Product,
    number: int,
    shapes: Sequence[tuple[int, ...]],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """The output of each member of a registered product, while Dynamo traces."""
    memory = sharded_product(input, weights, number)[:-1]
    tokens = input.shape[:-1].numel() * (product.out_ranks if product.enter == "tokens" else 1)
    return outputs_of(product, memory, product.widths(weights), tokens, shapes)


@torch.library.custom_op("fourfold::sharded_product", mutates_args=())
def sharded_product(input: Tensor, weights: Sequence[Tensor], product: int) -> list[Tensor]:
    """The memory of the outputs, and the gathered input if backward is to have it."""
    of = _products[product]
    full = gathered_input(of, input.reshape(-1, input.shape[-1]))
    return [*multiplied(of, full, weights), full if _keeps_gathered(of) else input.new_empty(0)]


@sharded_product.register_fake
def _(input: Tensor, weights: Sequence[Tensor], product: int) -> list[Tensor]:
    of = _products[product]
    rows, features = input.shape[:-1].numel(), input.shape[-1]
    tokens = rows * (of.out_ranks if of.enter == "tokens" else 1)
    widths = of.widths(weights)
    sizes: list[int] = []
    for leave, members in of.together:
        if of.in_ranks == 1:
            sizes += [tokens * widths[m] for m in members]
        else:
            sizes.append(tokens * sum(widths[m] for m in members) // (1 if leave == "whole" else of.in_ranks))
    parts = of.out_ranks if of.enter == "features" else 1
    full = (parts, rows * of.out_ranks // parts, features) if _keeps_gathered(of) else (0,)
    return [*(input.new_empty(size) for size in sizes), input.new_empty(full)]


@torch.library.custom_op("fourfold::sharded_product_backward", mutates_args=())
def _backward(
    input: Tensor,
    full: Tensor,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    product: int,
    wants_input: bool,
    wants_weights: bool,
) -> list[Tensor]:
    """``gradients`` are those of the memory that the product returned."""
    of = _products[product]
    own = input.reshape(-1, input.shape[-1])
    keeps_input = of.overlap.keep_inputs
    saved = full if _keeps_gathered(of) else own.unsqueeze(0) if keeps_input else own
    wants = [wants_weights] * len(weights)
    tokens = own.shape[0] * (of.out_ranks if of.enter == "tokens" else 1)
    apart = outputs_of(of, gradients, of.widths(weights), tokens, [(-1,)] * len(of.leaves))
    found, pending, of_weights = product_gradients(
        of, saved, weights, apart, input.shape, wants_input, wants, keeps_input=keeps_input
    )
    pending.wait()
    return [
        input.new_empty(0) if found is None else found,
        *(w.new_empty(0) if g is None else g for w, g in zip(weights, of_weights, strict=True)),
    ]


@_backward.register_fake
def _(
    input: Tensor, full: Tensor, weights: Sequence[Tensor], gradients: Any, product: int, *wants: bool
) -> list[Tensor]:
    wants_input, wants_weights = wants

    def like(tensor: Tensor, wanted: bool) -> Tensor:
        return (
            torch.empty_like(tensor, memory_format=torch.contiguous_format) if wanted else tensor.new_empty(0)
        )

    return [like(input, wants_input), *(like(weight, wants_weights) for weight in weights)]


def _setup(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    input, weights, ctx.product = inputs
    ctx.save_for_backward(input, output[-1], *weights)
    ctx.wants_input, ctx.wants_weights = input.requires_grad, any(w.requires_grad for w in weights)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor | None, list[Tensor] | None, None]:
    input, full, *weights = ctx.saved_tensors
    own = [gradient.contiguous() for gradient in gradients[:-1]]
    found, *of_weights = _backward(input, full, weights, own, ctx.product, ctx.wants_input, ctx.wants_weights)
    return (
        found if ctx.wants_input else None,
        of_weights if ctx.wants_weights else [None] * len(weights),  # type: ignore[list-item]
        None,
    )


sharded_product.register_autograd(_differentiate, setup_context=_setup)


def _keeps_gathered(product: Product) -> bool:
    return product.overlap.keep_inputs and product.enter != "whole" and product.out_ranks > 1
