"""The memory of a product's outputs, in chunks: one is reduced while the next is multiplied.

In a graph each chunk, and each member of a chunk, has memory of its own: to write a part of a tensor, a graph copies all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.parallel.product.product import Cut, Product

_Span = tuple[int, int, int, int]  # a member, its first row, the row after its last, columns


@dataclass(frozen=True)
class Chunk:
    """What one collective reduces of the members' outputs."""

    own: Tensor
    # [ranks, own]: this rank's parts of what each of them keeps.
    parts: Tensor
    # (member, which rows of each group of tokens, where to write [parts, groups, rows, features]): one for each member.
    # Where ranks keep tokens and a chunk has some of each rank's, the tokens of a rank are a group; otherwise all are one.
    products: list[tuple[int, slice, Tensor]]
    apart: tuple[Tensor, ...] = ()  # the memory of each member, where it is not in ``parts``

    def put_together(self) -> None:
        """Before it is sent: the members' products into ``parts``."""
        if self.apart:
            torch.cat(self.apart, dim=1, out=self.parts)


@dataclass(frozen=True)
class Outputs:
    """Memory for the outputs of members that are cut alike."""

    chunks: list[Chunk]
    together: tuple[Tensor, ...] = ()  # what the rank keeps of all chunks, if they have memory in common

    def kept(self) -> Sequence[Tensor]:
        """After all chunks are reduced."""
        own = [chunk.own for chunk in self.chunks]
        return self.together or (torch.cat(own) if len(own) > 1 else own[0],)


def memory_of(
    product: Product, members: Sequence[int], widths: Sequence[int], leave: Cut, full: Tensor
) -> Outputs:
    """For the outputs of ``members``, which are cut alike."""
    tokens = full.shape[1]
    if product.in_ranks == 1:
        # Nothing is sent. Separate memory, so that keeping one output (v in attention) does not keep the others.
        apart = tuple(_empty(tokens * width, full) for width in widths)
        chunks = [
            Chunk(out, out.view(1, -1), [(member, slice(None), out.view(1, 1, tokens, width))])
            for member, out, width in zip(members, apart, widths, strict=True)
        ]
        return Outputs(chunks, apart)
    ranks = 1 if leave == "whole" else product.in_ranks
    rows = tokens // ranks if leave == "tokens" else tokens
    columns = [width // ranks if leave == "features" else width for width in widths]
    count = product.overlap.chunks_of(
        ranks * rows * sum(columns), full.element_size(), full.shape[-1], product.target
    )
    spans = _divide(members, columns, rows, count)
    if product.is_traced:
        return Outputs([_chunk_apart(each, ranks, rows, leave, full) for each in spans])
    parts = _empty(ranks * rows * sum(columns), full)
    own = _empty(rows * sum(columns), full) if ranks > 1 else parts
    chunks, end = [], 0
    for each in spans:
        start, end = end, end + _size(each)
        memory = parts[ranks * start : ranks * end].view(ranks, end - start)
        chunks.append(Chunk(own[start:end], memory, _products(memory, each, rows, leave)))
    return Outputs(chunks, (own,))


def _chunk_apart(spans: Sequence[_Span], ranks: int, rows: int, leave: Cut, full: Tensor) -> Chunk:
    parts = _empty(ranks * _size(spans), full).view(ranks, -1)
    own = _empty(_size(spans), full) if ranks > 1 else parts.view(-1)
    if len(spans) == 1:
        return Chunk(own, parts, _products(parts, spans, rows, leave))
    apart = tuple(_empty(ranks * _size([span]), full).view(ranks, -1) for span in spans)
    products = [_products(memory, [span], rows, leave)[0] for memory, span in zip(apart, spans, strict=True)]
    return Chunk(own, parts, products, apart)


def _size(spans: Sequence[_Span]) -> int:
    return sum((last - first) * width for _, first, last, width in spans)


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
