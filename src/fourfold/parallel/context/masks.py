"""What transformers' masks become where ranks have parts of a sequence: a function of the query and the key, read block by block.

transformers makes a mask of length x length from its mask functions. Its registry takes other ways to make one: here a `CutMask`, which
keeps the function, and is asked about a few queries at a time, by their places in the whole sequence.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, masking_utils

from fourfold.errors import UnsupportedError, line_of_model
from fourfold.mesh.grid import Grid
from fourfold.parallel.context import documents
from fourfold.parallel.context.chunks import in_order, own_chunks
from fourfold.parallel.context.documents import Bounds, ChunkSizes

NAME = "fourfold_cut"
QUERIES = 512  # of a block, of which there is a mask at a time
KEYS = 8192  # that a block of queries is compared with at a time, to find those that it needs

# allowed(row, head, query, key), of indices that broadcast: transformers' own form.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Block(NamedTuple):
    """Queries, and the keys that one of them at least attends to."""

    own: slice  # the queries among the tokens of this rank
    queries: slice  # and in the sequence
    keys: slice


@dataclass(frozen=True, eq=False)
class Sequences:
    """The whole sequences of a batch, of which this rank has two chunks; the same object in forward and in backward."""

    model: str
    grid: Grid
    positions: Tensor  # [rows, length], in the order of the sequence; a document begins at 0
    documents: Tensor  # the number of the document, which grows along a row
    chunks: tuple[slice, slice]
    sizes: list[ChunkSizes]  # of the documents in each chunk
    # The modules whose attention ran, in a first forward.
    called: set[nn.Module] = field(default_factory=set)

    @staticmethod
    def of(model: str, grid: Grid, own_positions: Tensor, checksums: Tensor | None = None) -> Sequences:
        """From the positions of each rank's tokens, [rows, own length]; ``checksums`` are those of the whole rows."""
        ranks, size = grid.sequence_ranks, own_positions.shape[1]
        own = own_positions if checksums is None else torch.cat([own_positions, checksums.unsqueeze(1)], 1)
        gathered = own.new_empty(ranks, *own.shape)
        grid.collectives.all_gather(gathered, own.contiguous(), "sequence", "positions").wait()
        positions = in_order(gathered[..., :size], 1)
        begins = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)
        others = gathered[..., size:] != (0 if checksums is None else checksums.unsqueeze(1))
        chunks = own_chunks(positions.shape[1], ranks, grid.coordinate("sequence"))
        failed, sizes = documents.sizes_of(positions, chunks, (others, begins & (positions != 0)))
        if failed[0]:
            raise ValueError(
                f"the {ranks} ranks that share sequences cut different rows, so that {model} would attend to tokens of other rows: "
                "let them read the same ones, those of Grid.local_rows or of Grid.batch_rank"
            )
        if failed[1]:
            raise ValueError(
                f"the positions of the {ranks} ranks that share sequences are not those of whole documents: pass to {model} what "
                "fourfold.cut_sequences returns for the rows of the batch, whose positions begin at 0 with each document"
            )
        return Sequences(model, grid, positions, begins.cumsum(1), chunks, sizes)


class CutMask:
    """Which keys of the whole sequence each of this rank's queries attends to."""

    def __init__(self, sequences: Sequences, allowed: MaskFunction) -> None:
        self.sequences = sequences
        self.is_causal, self.window = causal_window(allowed)
        self._allowed = allowed
        self._blocks: list[Block] | None = None
        self._bounds: list[Bounds] | None = None

    def of(self, queries: slice, keys: slice) -> Tensor:
        """[rows, 1, queries, keys]."""
        at, numbers = self.sequences.positions, self.sequences.documents
        rows = torch.arange(len(at), device=at.device).view(-1, 1, 1, 1)
        query, key = at[:, None, queries, None], at[:, None, None, keys]
        # Inside a document positions are as good as places in the row: a function of these counts from the document's begin.
        inside = numbers[:, None, queries, None] == numbers[:, None, None, keys]
        return inside & self._allowed(rows, rows.new_zeros(1, 1, 1, 1), query, key)

    def bounds(self) -> list[Bounds]:
        """Of a causal mask: where pieces of documents begin, in each of this rank's chunks; made once for all layers that have this mask."""
        assert self.is_causal
        if self._bounds is None:
            s = self.sequences
            self._bounds = [
                documents.bounds_of(s.positions, chunk, sizes, self.window)
                for chunk, sizes in zip(s.chunks, s.sizes, strict=True)
            ]
        return self._bounds

    def blocks(self) -> list[Block]:
        """The blocks of this rank's queries; made once for all layers that have this mask."""
        if self._blocks is None:
            self._blocks = list(self._find_blocks())
        return self._blocks

    def _find_blocks(self) -> Iterator[Block]:
        own = 0
        found = []
        for chunk in self.sequences.chunks:
            for first in range(chunk.start, chunk.stop, QUERIES):
                queries = slice(first, min(first + QUERIES, chunk.stop))
                size = queries.stop - queries.start
                found.append((slice(own, own + size), queries))
                own += size
        keys = self._keys_of([queries for _, queries in found])
        for (at, queries), needed in zip(found, keys, strict=True):
            yield Block(at, queries, needed)

    def _keys_of(self, blocks: list[slice]) -> list[slice]:
        """The keys of each block; read on the host once, not for each."""
        positions = self.sequences.positions
        if self.is_causal:
            most = positions.shape[1] if self.window is None else self.window - 1
            before = documents.tokens_before(positions, [queries.start for queries in blocks])
            return [
                slice(queries.start - min(tokens, most), queries.stop)
                for queries, tokens in zip(blocks, before, strict=True)
            ]
        length = positions.shape[1]
        parts = [slice(key, min(key + KEYS, length)) for key in range(0, length, KEYS)]
        ends = []
        for queries in blocks:
            needed = torch.cat([self.of(queries, keys).any(2).flatten(0, 1).any(0) for keys in parts]).int()
            ends.append(torch.stack([needed.argmax(), length - needed.flip(0).argmax()]))
        return [slice(begin, end) for begin, end in torch.stack(ends).tolist()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unsupported(f"reads {name} of its mask")

    def _calculate(self, *_: Any) -> Any:
        raise self._unsupported("calculates with its mask")

    __getitem__ = __add__ = __radd__ = __mul__ = __and__ = __or__ = __invert__ = _calculate

    def _unsupported(self, what: str) -> UnsupportedError:
        sequences = self.__dict__["sequences"]
        line = line_of_model(traceback.extract_stack())
        return UnsupportedError(
            f"{sequences.model} {what} ({line}), but with sequence_ranks={sequences.grid.sequence_ranks} a rank has a part of the "
            "sequence alone; use sequence_ranks=1"
        )


def causal_window(allowed: MaskFunction) -> tuple[bool, int | None]:
    """(is it transformers' causal mask, its sliding window)."""
    if allowed is masking_utils.causal_mask_function:
        return True, None
    pair = _captured(allowed, masking_utils.and_masks(allowed))
    if pair is None or len(pair) != 2 or pair[1] is not masking_utils.causal_mask_function:
        return False, None
    window = _captured(pair[0], masking_utils.sliding_window_overlay(1))
    return window is not None, window


def _captured(function: Any, like: Any) -> Any:
    """The one value that a function has from the call that made it, if that also made ``like``."""
    if getattr(function, "__code__", None) is not like.__code__:
        return None
    (cell,) = function.__closure__
    return cell.cell_contents


_current = threading.local()  # half-batches run in threads


@contextmanager
def masks_of(sequences: Sequences) -> Iterator[None]:
    """Inside, transformers' masks are those of these sequences."""
    before = getattr(_current, "sequences", None)
    _current.sequences = sequences
    try:
        yield
    finally:
        _current.sequences = before


def _make_mask(
    *,
    mask_function: MaskFunction,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> CutMask:
    """For transformers' registry of ways to make a mask."""
    sequences: Sequences | None = getattr(_current, "sequences", None)
    if sequences is None:
        raise UnsupportedError(
            "a part of a model whose ranks share sequences was called on its own; call the model, which knows the positions of all ranks"
        )
    if use_vmap or not (allow_is_causal_skip or allow_is_bidirectional_skip):
        # transformers allows to leave a mask out where nothing but places decides: no blocks of images, no function of the model's.
        raise UnsupportedError(
            f"{sequences.model} has a mask of its own ({line_of_model(traceback.extract_stack()[:-2])}), which would be made of a part "
            f"of the sequence; use sequence_ranks=1 instead of {sequences.grid.sequence_ranks}"
        )
    return CutMask(sequences, mask_function)


AttentionMaskInterface.register(NAME, _make_mask)
