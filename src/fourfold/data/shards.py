"""Shards: token files of bounded size, each with a file of document ends."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from fourfold import files
from fourfold.untrusted_input import Natural, relative_name

ENDS_DTYPE = np.dtype("<u4")  # positions in one shard
SHARD_TOKENS = 1 << 27


@dataclass(frozen=True)
class Shard:
    """``NAME.bin``: tokens; ``NAME.ends``: one past the last token of each document that ends in it."""

    name: Annotated[str, AfterValidator(relative_name)]
    tokens: Natural
    documents: Natural
    bin_xxh3: str
    ends_xxh3: str


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest little-endian dtype that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes documents one after another; a document may continue in the next shard."""

    def __init__(
        self, folder: Path, prefix: str, dtype: np.dtype[Any], shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._folder, self._prefix, self._dtype, self._limit = folder, prefix, dtype, shard_tokens
        self._open: tuple[_HashedFile, _HashedFile] | None = None
        self._tokens = self._documents = 0
        self.shards: list[Shard] = []

    def add(self, document: NDArray[Any]) -> None:
        begin = 0
        while begin < len(document):
            if self._tokens == self._limit:
                self.close()
            tokens, ends = self._files()
            piece = document[begin : begin + self._limit - self._tokens]
            tokens.write(piece.astype(self._dtype, copy=False).tobytes())
            self._tokens += len(piece)
            begin += len(piece)
            if begin == len(document):
                ends.write(ENDS_DTYPE.type(self._tokens).tobytes())
                self._documents += 1

    def close(self) -> None:
        """Finish the shard: it gets its name once all of it is on the disk."""
        if self._open is None:
            return
        name = self._name
        digests = [file.close() for file in self._open]
        self.shards.append(Shard(name, self._tokens, self._documents, *digests))
        self._open, self._tokens, self._documents = None, 0, 0

    @property
    def _name(self) -> str:
        return f"{self._prefix}-{len(self.shards):03d}"

    def _files(self) -> tuple[_HashedFile, _HashedFile]:
        if self._open is None:
            path = self._folder / self._name
            self._open = (_HashedFile(path.with_suffix(".bin")), _HashedFile(path.with_suffix(".ends")))
        return self._open


class _HashedFile:
    """A file that is hashed as it is written, and has another name until it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = files.unfinished(path).open("wb")
        self._hash = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def close(self) -> str:
        files.publish(self._file, self._path)
        return self._hash.hexdigest()


# -- verification --------------------------------------------------------------------------------


def find_damage(folder: Path, shards: list[Shard], dtype: np.dtype[Any], *, contents: bool) -> Iterator[str]:
    """Problems of the files of these shards: presence and size, and with ``contents`` also hashes."""
    for shard in shards:
        for suffix, size_bytes, digest in (
            (".bin", shard.tokens * dtype.itemsize, shard.bin_xxh3),
            (".ends", shard.documents * ENDS_DTYPE.itemsize, shard.ends_xxh3),
        ):
            path = folder / (shard.name + suffix)
            if not path.exists():
                yield f"{path} is missing"
            elif path.stat().st_size != size_bytes:
                yield f"{path} has {path.stat().st_size} bytes, not {size_bytes}"
            elif contents and (found := file_xxh3(path)) != digest:
                yield f"{path} has the xxh3 {found}, not {digest}: its bytes have changed"


def file_xxh3(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time write to a folder; the system releases the lock when the process ends."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is preparing {folder}; wait for it, or use another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)
