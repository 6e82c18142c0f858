"""Which product: its axes, how its activations are cut, and its collectives.

The features of the input are sharded over ``in_axis``, those of the output over ``out_axis``. The other axis of each activation shards its
tokens, or a second time its features, or nothing:

    cut         an activation over its second axis         to multiply it     after the product
    tokens      each rank has some of the tokens           all-gather         reduce-scatter
    features    each rank has some of the features         all-gather         reduce-scatter
    whole       each rank has all of it                    nothing            all-reduce

Activations that are replicated are the case in which every cut is "whole". An all-reduce sends as many bytes as a
reduce-scatter and an all-gather, so all cuts cost the same traffic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Pending, Purpose
from fourfold.weights.nf4 import dequantize, is_packed
from fourfold.weights.overlap import Overlap

Cut = Literal["tokens", "features", "whole"]


@dataclass(frozen=True)
class Adapter:
    """A member's adapter of low rank: where its weights are among all, A as [rank, in] and B as [out, rank]."""

    a: int
    b: slice
    scale: float
    dropout: float = 0.0  # the share of the numbers of its input that are 0, in training


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
    # Of each member that has one; their weights follow those of all members.
    adapters: tuple[Adapter | None, ...] = ()
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

    def adapter(self, member: int) -> Adapter | None:
        return self.adapters[member] if self.adapters else None

    def blocks(self, weights: Sequence[Tensor], member: int, dtype: torch.dtype) -> list[Tensor]:
        """A member's weights as [out, in]; of packed ones the numbers, in ``dtype``."""
        own = [dequantize(w, dtype) if is_packed(w) else w for w in weights[self.spans[member]]]
        return [w.t() for w in own] if self.transposed else own


class Blocks:
    """The weights of members as [out, in]. The numbers of packed ones are there while a member is in use: of one at a time."""

    def __init__(self, product: Product, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._product, self._weights, self._dtype = product, weights, dtype
        self._member = -1
        self._blocks: list[Tensor] = []

    def __getitem__(self, member: int) -> list[Tensor]:
        if member != self._member:
            self._blocks = []  # before the next ones are made
            self._blocks = self._product.blocks(self._weights, member, self._dtype)
            self._member = member
        return self._blocks
