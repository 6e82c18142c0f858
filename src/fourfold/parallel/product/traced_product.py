"""The sharded product in the graph of a compiled block.

Dynamo sees one operator. Autograd takes it apart, into the matmuls and collectives of `linear_op.py`, which are what the graph has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fourfold.mesh.operators import traced
from fourfold.parallel.product.linear_op import sharded_product
from fourfold.parallel.product.product import Product

_products: WeakValueDictionary[int, Product] = WeakValueDictionary()
_numbers = itertools.count()


def register(product: Product) -> tuple[int, Product]:
    """A number for a product, the same for those of blocks that are alike, so that they share a graph; valid while that product is held."""
    parts = ["*" if part.isdecimal() else part for part in product.name.split(".")]
    alike = replace(
        product, name=".".join(parts), defers=False, collectives=traced(product.collectives), is_traced=True
    )
    for number, known in _products.items():
        if known == alike:
            return number, known
    number = next(_numbers)
    _products[number] = alike
    return number, alike


def traced_product(
    input: Tensor, number: int, shapes: Sequence[tuple[int, ...]], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The output of each member of a registered product, while Dynamo traces."""
    flat = torch.ops.fourfold.sharded_product(input, weights, number)
    return [output.view(*shape, output.shape[-1]) for output, shape in zip(flat, shapes, strict=True)]


def _sharded_product(input: Tensor, weights: Sequence[Tensor], product: int) -> list[Tensor]:
    of = _products[product]
    return list(sharded_product(input, of, [(-1,)] * len(of.leaves), weights))


_library = torch.library.Library("fourfold", "FRAGMENT")
_library.define("sharded_product(Tensor input, Tensor[] weights, int product) -> Tensor[]")
_library.impl("sharded_product", _sharded_product, "CompositeImplicitAutograd")
