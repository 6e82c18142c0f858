"""An adapter's part of a product: s (I A^T), of which B^T makes its part of O, and its gradients.

With dropout an adapter reads I with some of its numbers set to 0, and the others over the share that stays. The mask follows from a seed, so
that backward, and a recomputed forward, draw it again: nothing is kept. Ranks of the output's axis read the same part of I, and have the
same seed; those of the input's axis have others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fourfold.parallel.float8.operands import Float8
from fourfold.parallel.product.product import Adapter

_A = TypeVar("_A", bound=Tensor | Float8)
_B = TypeVar("_B", bound=Tensor | Float8)


def mask(adapter: Adapter, member: int, full: Tensor, seed: int | None) -> Tensor | None:
    """What multiplies the input that ``member`` of a product reads for its adapter; None: no dropout, or not in training."""
    if seed is None or not adapter.dropout:
        return None
    generator = torch.Generator(full.device)
    generator.manual_seed((seed + member) % 2**63)
    stays = 1 - adapter.dropout
    kept = torch.empty_like(full, memory_format=torch.contiguous_format)
    return kept.bernoulli_(stays, generator=generator).div_(stays)


def low_rank(adapter: Adapter, full: Tensor, weights: Sequence[Tensor], kept: Tensor | None) -> Tensor:
    """s I A^T: [tokens, rank]; where the input's features are sharded, a part of a sum, which is not reduced."""
    low: Tensor | None = None
    read = full if kept is None else full * kept
    for part, columns in zip(each(read), weights[adapter.a].chunk(len(full), dim=1), strict=True):
        low = torch.mm(part, columns.t()) if low is None else torch.addmm(low, part, columns.t())
    return cast(Tensor, low).mul_(adapter.scale)


def low_rank_gradient(adapter: Adapter, gradient: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """s dO B: [tokens, rank], of this rank's features of dO."""
    low: Tensor | None = None
    for out, _, block in terms(gradient, weights[adapter.b], 1):
        low = torch.mm(out, block) if low is None else torch.addmm(low, out, block)
    return cast(Tensor, low).mul_(adapter.scale)


def add_input_gradient(
    adapter: Adapter, parts: Tensor, low: Tensor, weights: Sequence[Tensor], kept: Tensor | None
) -> None:
    """Add (s dO B) A to dI."""
    masks = [None] * len(parts) if kept is None else each(kept)
    columns = weights[adapter.a].chunk(len(parts), dim=1)
    for part, block, stays in zip(each(parts), columns, masks, strict=True):
        if stays is None:
            torch.addmm(part, low, block, out=part)
        else:
            part.addcmul_(torch.mm(low, block), stays)


def gradients(
    adapter: Adapter,
    full: Tensor,
    gradient: Tensor,
    low_gradient: Tensor,
    weights: Sequence[Tensor],
    kept: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """(that of A, those of B)."""
    read = full if kept is None else full * kept
    of_a = torch.cat([torch.mm(low_gradient.t(), part) for part in each(read)], dim=1)
    of_b = [torch.empty_like(w) for w in weights[adapter.b]]
    low = low_rank(adapter, read, weights, None)
    for out, _, block in terms(gradient, of_b, 1):
        torch.mm(out.t(), low, out=block)
    return of_a, of_b


def terms(parts: _A, blocks: Sequence[_B], count: int) -> Iterator[tuple[_A, int, _B]]:
    """(columns of an output, which part of the input, the piece of a weight between them).

    One for each weight of a member, unless the output or the input is cut by its features.
    """
    if len(parts) == 1 and len(blocks) == 1 and count == 1:
        yield each(parts)[0], 0, blocks[0]
        return
    of_parts: Any = zip(*(b.chunk(len(parts)) for b in blocks), strict=True)
    for part, rows in zip(each(parts), of_parts, strict=True):
        columns: Any = part.split([r.shape[0] for r in rows], dim=-1)
        for column, row in zip(columns, rows, strict=True):
            for i, piece in enumerate(row.chunk(count, dim=1)):
                yield column, i, piece


def each(parts: _A) -> Sequence[_A]:
    """The parts, to read or to write. A view of all of the memory, where there is one: a graph copies into a part of it."""
    found: Any = parts
    if isinstance(parts, Float8):
        return [found[i] for i in range(len(parts))]
    return [found.squeeze(0)] if len(parts) == 1 else found.unbind()
