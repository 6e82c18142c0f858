"""What the host has to know of the documents of cut sequences, read once in a forward; and their bounds, which stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ChunkSizes(NamedTuple):
    """The documents in one of this rank's chunks."""

    pieces: int  # of documents, over all rows
    longest_queries: int
    longest_keys: int
    before: tuple[int, ...]  # of each row: the tokens before the chunk of the document that it begins with


class Bounds(NamedTuple):
    """The arguments of variable-length attention of a chunk to a prefix of keys: where pieces of documents begin and end."""

    keys: tuple[slice, ...]  # of each row, in the sequence; those of all rows follow one another
    of_queries: Tensor
    of_keys: Tensor
    longest_queries: int
    longest_keys: int


def sizes_of(
    positions: Tensor, chunks: Sequence[slice], wrong: Sequence[Tensor]
) -> tuple[list[bool], list[ChunkSizes]]:
    """(which of the checks have failed, the sizes of each chunk) of [rows, length] positions.

    The only wait of the host for the device in a forward of cut sequences.
    """
    numbers = [check.any().long().view(1) for check in wrong]
    for chunk in chunks:
        inside = positions[:, chunk]
        places = torch.arange(inside.shape[1], device=positions.device)
        pieces = 1 + (inside[:, 1:] == 0).sum(1)
        longest = torch.stack([pieces.sum(), torch.minimum(inside, places).max() + 1, inside.max() + 1])
        numbers += [longest, inside[:, 0]]
    parts = iter(torch.cat(numbers).tolist())
    failed = [bool(next(parts)) for _ in wrong]
    rows = len(positions)
    sizes = []
    for _ in chunks:
        pieces_, queries, keys = next(parts), next(parts), next(parts)
        sizes.append(ChunkSizes(pieces_, queries, keys, tuple(next(parts) for _ in range(rows))))
    return failed, sizes


def one_document(
    positions: Tensor, chunks: Sequence[slice], wrong: Sequence[Tensor]
) -> tuple[list[bool], list[ChunkSizes]]:
    """The same where each row is one document: for tensors without values."""
    rows = len(positions)
    return [False for _ in wrong], [
        ChunkSizes(rows, chunk.stop - chunk.start, chunk.stop, (chunk.start,) * rows) for chunk in chunks
    ]


def bounds_of(positions: Tensor, chunk: slice, sizes: ChunkSizes, window: int | None) -> Bounds:
    """The bounds of a causal chunk, and of the keys that its queries attend to, within a sliding window."""
    inside = positions[:, chunk]
    most = sizes.longest_keys if window is None else window - 1  # keys before the first query of a piece
    begins = inside == 0
    begins[:, 0] = True
    wanted = torch.arange(1, sizes.pieces + 2, device=positions.device)
    # The number of pieces is known, so the device is not asked for it; behind the last one is the end.
    of_queries = torch.searchsorted(begins.flatten().cumsum(0), wanted)
    # A piece that is no document's begin is the first of its row: as many tokens of its document are before it as its position says.
    keys = of_queries.diff() + inside.flatten()[of_queries[:-1]].clamp(max=most)
    longest = sizes.longest_keys
    if window is not None:
        longest = min(longest, sizes.longest_queries + window - 1)
    return Bounds(
        tuple(slice(chunk.start - min(before, most), chunk.stop) for before in sizes.before),
        of_queries.int(),
        F.pad(keys.cumsum(0), (1, 0)).int(),
        sizes.longest_queries,
        longest,
    )


def tokens_before(positions: Tensor, places: Sequence[int]) -> list[int]:
    """The most tokens, of any row, that are before each place in its document; waits for the device."""
    found: list[int] = positions[:, list(places)].amax(0).tolist()
    return found


def all_before(positions: Tensor, places: Sequence[int]) -> list[int]:
    """The same where each row is one document."""
    return list(places)
