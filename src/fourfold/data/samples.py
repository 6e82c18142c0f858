"""Samples: rows of one length over the tokens of a prepared dataset; a sample may contain several documents.

Sample i of text is the tokens [i * length, (i + 1) * length) of all documents concatenated. A sample of chats has whole chats,
and is filled up with tokens that do not count. Documents that share a sample do not affect each other, because attention stays
within a document; only the order of samples changes between epochs.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.data.manifest import DatasetManifest, Split
from fourfold.data.packing import best_fit
from fourfold.data.shards import ENDS, ENDS_DTYPE, LOSS, TOKENS
from fourfold.data.tokenizer import load_tokenizer

NO_LABEL = -100
OPEN_SHARDS = 64  # each holds two or three file descriptors

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Sample(NamedTuple):
    """The inputs of a Hugging Face causal LM, each [length].

    ``position_ids`` restart at 0 with each document, from which the model derives its attention mask. ``labels`` are the
    tokens themselves (the model shifts them); the first token of a document has no label, because the token before it
    belongs to another document. In chats only tokens of the assistant have one.
    """

    input_ids: Ints
    labels: Ints
    position_ids: Ints


class Samples:
    """The samples of one split of a prepared dataset, read from mapped files.

    Example:
        >>> samples = Samples("prepared", "train", length=1024)    # doctest: +SKIP
        >>> samples[0].input_ids.shape                             # doctest: +SKIP
        (1024,)
    """

    def __init__(self, folder: str | Path, split: Split, length: int) -> None:
        if length < 2:
            raise ValueError(
                f"a sample of {length} tokens has nothing to predict; use a length of at least 2"
            )
        self.folder, self.length = Path(folder), length
        self.manifest = DatasetManifest.load(self.folder)
        if wrong := self.manifest.find_damage(self.folder, contents=False):
            raise ValueError(f"{wrong[0]}; copy the folder again, or prepare it with --overwrite")
        self._shards = self.manifest.shards[split]
        self._stops = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        self._tokens = int(self._stops[-1]) if self._shards else 0
        self._open = lru_cache(OPEN_SHARDS)(self._map)

    def __len__(self) -> int:
        return len(self._rows) if self.manifest.has_chats else self._tokens // self.length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.folder}")
        if self.manifest.has_chats:
            tokens, counted, starts = self._row_of_chats(self._rows[index])
        else:
            tokens, counted, starts = self._read(index * self.length, (index + 1) * self.length)
        self._check(index, tokens, starts)
        positions = np.arange(self.length, dtype=np.int64)
        positions -= np.repeat(starts, np.diff(starts, append=self.length))
        return Sample(tokens, np.where((positions == 0) | ~counted, NO_LABEL, tokens), positions)

    # -- chats ------------------------------------------------------------------------------------------------------------

    @property
    def too_long(self) -> int:
        """Chats that no sample takes, which are left out."""
        return int((self._lengths > self.length).sum()) if self.manifest.has_chats else 0

    def describe_packing(self) -> str:
        """How chats fill samples, in a line."""
        taken = int(self._lengths[self._lengths <= self.length].sum())
        left_out = f"; {self.too_long:,} longer chats are left out" if self.too_long else ""
        full = f", {taken / (len(self) * self.length):.0%} full" if len(self) else ""
        return f"  packed      {len(self):,} samples of {self.length:,} tokens{full}{left_out}"

    @cached_property
    def _stops_of_chats(self) -> Ints:
        begins = self._stops - [shard.tokens for shard in self._shards]
        stops = [self._open(n)[ENDS].astype(np.int64) + begins[n] for n in range(len(self._shards))]
        return np.concatenate(stops) if stops else np.zeros(0, np.int64)

    @cached_property
    def _lengths(self) -> Ints:
        return np.diff(self._stops_of_chats, prepend=0)

    @cached_property
    def _rows(self) -> list[list[int]]:
        return best_fit(self._lengths, self.length)

    def _row_of_chats(self, chats: list[int]) -> tuple[Ints, Bools, Ints]:
        tokens = np.full(self.length, self.manifest.tokenizer.eos_id, np.int64)
        counted = np.zeros(self.length, np.bool_)
        starts = [0]
        for chat in chats:
            stop = int(self._stops_of_chats[chat])
            at, end = starts[-1], starts[-1] + int(self._lengths[chat])
            tokens[at:end], counted[at:end], _ = self._read(stop - (end - at), stop)
            starts.append(end)  # also of what fills the sample up
        return tokens, counted, np.array([start for start in starts if start < self.length])

    # -- files ------------------------------------------------------------------------------------------------------------

    def _check(self, index: int, tokens: Ints, starts: Ints) -> None:
        """An id outside the vocabulary would fail on a GPU without a useful message."""
        highest, vocabulary = int(tokens.max()), self.manifest.tokenizer.vocab_size
        if highest >= vocabulary:
            raise ValueError(
                f"{self.folder}: sample {index} has the token {highest}, its vocabulary has {vocabulary}; run `fourfold data info "
                f"{self.folder} --verify`, and copy the folder again"
            )
        if bool((np.diff(starts) < 0).any()):
            raise ValueError(
                f"{self.folder}: documents of sample {index} end before they start; copy the folder again"
            )

    def _read(self, first: int, stop: int) -> tuple[Ints, Bools, Ints]:
        """(the tokens [first, stop), whether each counts, the starts of documents among them; the first is always 0)."""
        tokens, counted = np.empty(stop - first, np.int64), np.ones(stop - first, np.bool_)
        starts = [np.zeros(1, np.int64)]
        at = first
        number = int(np.searchsorted(self._stops, first, side="right"))
        while at < stop:
            begin = int(self._stops[number]) - self._shards[number].tokens
            end = min(stop, int(self._stops[number]))
            shard, here = self._open(number), slice(at - begin, end - begin)
            tokens[at - first : end - first] = shard[TOKENS][here]
            if LOSS in shard:
                counted[at - first : end - first] = shard[LOSS][here] != 0
            # A document that ends at e is followed by one that starts there; at the end, that is in the next sample.
            ends = shard[ENDS]
            inside = ends[
                np.searchsorted(ends, here.start, "right") : np.searchsorted(ends, here.stop, "right")
            ]
            starts.append(inside.astype(np.int64) + (begin - first))
            at, number = end, number + 1
        begins = np.concatenate(starts)
        return tokens, counted, begins[begins < stop - first]

    def _map(self, number: int) -> dict[str, NDArray[np.unsignedinteger]]:
        """The files of a shard by their suffixes."""
        shard = self._shards[number]
        dtypes = {TOKENS: self.manifest.dtype, ENDS: ENDS_DTYPE}
        if shard.loss_xxh3 is not None:
            dtypes[LOSS] = np.dtype(np.uint8)
        if not shard.documents:  # no document ends here; an empty file cannot be mapped
            del dtypes[ENDS]
        mapped = {
            suffix: np.memmap(self.folder / f"{shard.name}{suffix}", dtype, "r")
            for suffix, dtype in dtypes.items()
        }
        return {ENDS: np.empty(0, ENDS_DTYPE), **mapped}


def show(folder: Path, length: int, count: int) -> None:
    """Print the text of the first training samples; of chats, which tokens the loss counts."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(folder / "tokenizer")
    samples = Samples(folder, "train", length)
    if samples.manifest.has_chats:
        marked = "in green" if console.is_terminal else "between « and »"
        console.print(f"the loss counts what is {marked}")
    for number in range(min(count, len(samples))):
        console.print(f"-- sample {number}")
        sample = samples[number]
        if not samples.manifest.has_chats:
            console.print(Text(tokenizer.decode(sample.input_ids)))
            continue
        is_new = np.append(True, np.diff(sample.labels != NO_LABEL) | (sample.position_ids[1:] == 0))
        text = Text()
        for piece in np.split(np.arange(length), np.flatnonzero(is_new)[1:]):
            if sample.position_ids[piece[0]] == 0 and piece[0]:
                text.append("\n-- another chat of this sample\n", "dim")
            counts = sample.labels[piece[0]] != NO_LABEL
            words = tokenizer.decode(sample.input_ids[piece])
            text.append(
                words if console.is_terminal or not counts else f"«{words}»", "green" if counts else ""
            )
        console.print(text)
