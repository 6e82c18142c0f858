"""Samples: fixed-length windows over the tokens of a prepared dataset; a sample may contain several documents.

Sample i is the tokens [i * length, (i + 1) * length) of all documents concatenated. Documents that share a sample do not
affect each other, because attention stays within a document; only the order of samples changes between epochs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.data.manifest import DatasetManifest, Split
from fourfold.data.shards import ENDS_DTYPE
from fourfold.data.tokenizer import load_tokenizer

NO_LABEL = -100
OPEN_SHARDS = 64  # each holds two file descriptors

Ints = NDArray[np.int64]


class Sample(NamedTuple):
    """The inputs of a Hugging Face causal LM, each [length].

    ``position_ids`` restart at 0 with each document, from which the model derives its attention mask. ``labels`` are the
    tokens themselves (the model shifts them); the first token of a document has no label, because the token before it
    belongs to another document.
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
        return self._tokens // self.length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.folder}")
        tokens, starts = self._read(index * self.length, (index + 1) * self.length)
        self._check(index, tokens, starts)
        positions = np.arange(self.length, dtype=np.int64)
        positions -= np.repeat(starts, np.diff(starts, append=self.length))
        return Sample(tokens, np.where(positions == 0, NO_LABEL, tokens), positions)

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

    def _read(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """(the tokens [first, stop), the starts of documents among them; the first is always 0)."""
        tokens = np.empty(stop - first, np.int64)
        starts = [np.zeros(1, np.int64)]
        at = first
        number = int(np.searchsorted(self._stops, first, side="right"))
        while at < stop:
            begin = int(self._stops[number]) - self._shards[number].tokens
            end = min(stop, int(self._stops[number]))
            ids, ends = self._open(number)
            tokens[at - first : end - first] = ids[at - begin : end - begin]
            # A document that ends at e is followed by one that starts there; at the end, that is in the next sample.
            inside = ends[
                np.searchsorted(ends, at - begin, "right") : np.searchsorted(ends, end - begin, "right")
            ]
            starts.append(inside.astype(np.int64) + (begin - first))
            at, number = end, number + 1
        begins = np.concatenate(starts)
        return tokens, begins[begins < stop - first]

    def _map(self, number: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]:
        shard = self._shards[number]
        ids = np.memmap(self.folder / f"{shard.name}.bin", self.manifest.dtype, "r")
        if not shard.documents:  # no document ends here; an empty file cannot be mapped
            return ids, np.empty(0, ENDS_DTYPE)
        return ids, np.memmap(self.folder / f"{shard.name}.ends", ENDS_DTYPE, "r")


def show(folder: Path, length: int, count: int) -> None:
    """Print the text of the first training samples."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    samples = Samples(folder, "train", length)
    for number in range(min(count, len(samples))):
        print(f"-- sample {number}\n{tokenizer.decode(samples[number].input_ids)}")
