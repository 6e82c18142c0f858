"""Shards: token files of bounded size, each with a file of document ends, and for chats one of the tokens that count."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from fourfold import files
from fourfold.untrusted_input import Natural, relative_name

TOKENS, ENDS, LOSS = ".bin", ".ends", ".loss"
ENDS_DTYPE = np.dtype("<u4")  # positions in one shard
SHARD_TOKENS = 1 << 27


@dataclass(frozen=True)
class Shard:
    """``NAME.bin``: tokens; ``NAME.ends``: one past the last token of each document that ends in it.

    Of chats also ``NAME.loss``: a byte for each token, 1 if the loss counts it.
    """

    name: Annotated[str, AfterValidator(relative_name)]
    tokens: Natural
    documents: Natural
    bin_xxh3: str
    ends_xxh3: str
    loss_xxh3: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest little-endian dtype that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes documents one after another; a document may continue in the next shard."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        dtype: np.dtype[Any],
        shard_tokens: int = SHARD_TOKENS,
        *,
        chats: bool = False,
    ) -> None:
        self._folder, self._prefix, self._dtype, self._limit = folder, prefix, dtype, shard_tokens
        self._suffixes = (TOKENS, ENDS, LOSS) if chats else (TOKENS, ENDS)
        self._open: dict[str, _HashedFile] = {}
        self._tokens = self._documents = 0
        self.shards: list[Shard] = []

    def add(self, document: NDArray[Any], counted: NDArray[np.bool_] | None = None) -> None:
        """``counted``: of a chat, the tokens that the loss counts."""
        begin = 0
        while begin < len(document):
            if self._tokens == self._limit:
                self.close()
            opened = self._files()
            piece = slice(begin, begin + self._limit - self._tokens)
            opened[TOKENS].write(document[piece].astype(self._dtype, copy=False).tobytes())
            if counted is not None:
                opened[LOSS].write(counted[piece].tobytes())
            written = len(document[piece])
            self._tokens += written
            begin += written
            if begin == len(document):
                opened[ENDS].write(ENDS_DTYPE.type(self._tokens).tobytes())
                self._documents += 1

    def close(self) -> None:
        """Finish the shard: it gets its name once all of it is on the disk."""
        if not self._open:
            return
        name = self._name
        digests = [file.close() for file in self._open.values()]
        self.shards.append(Shard(name, self._tokens, self._documents, *digests))
        self._open, self._tokens, self._documents = {}, 0, 0

    @property
    def _name(self) -> str:
        return f"{self._prefix}-{len(self.shards):03d}"

    def _files(self) -> dict[str, _HashedFile]:
        if not self._open:
            path = self._folder / self._name
            self._open = {suffix: _HashedFile(path.with_suffix(suffix)) for suffix in self._suffixes}
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
            (TOKENS, shard.tokens * dtype.itemsize, shard.bin_xxh3),
            (ENDS, shard.documents * ENDS_DTYPE.itemsize, shard.ends_xxh3),
            (LOSS, shard.tokens, shard.loss_xxh3),
        ):
            if digest is None:
                continue
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
