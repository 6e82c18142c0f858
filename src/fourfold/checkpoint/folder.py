"""A folder on a disk or at an fsspec URL, with the operations that a checkpoint needs.

A file is durable when `write` returns: on a disk after fsync, on an object store once the upload is complete.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fourfold.untrusted_input import open_file

MAX_CALL_BYTES = 64 * 2**20  # of one read or write call


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a file, as the manifest lists them."""

    size: int
    xxh3_128: str


def open_folder(where: str | os.PathLike[str]) -> Folder:
    """A local path, or any URL that fsspec knows, such as ``s3://bucket/run``."""
    text = os.fspath(where)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return RemoteFolder.open(text) if "://" in text else LocalFolder(Path(text))


class FileCalls:
    """The system calls that change a folder on a disk; in one place, so that tests can inject faults into them."""

    def write(self, descriptor: int, view: memoryview, path: Path) -> int:
        # The kernel may write less than it is given.
        return os.write(descriptor, view)

    def fsync(self, descriptor: int, path: Path) -> None:
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


calls = FileCalls()


class LocalFolder:
    """A folder on a disk, or on a file system that all ranks share."""

    renames = True  # its subfolders, atomically
    # Shorter ranges are cheaper to read together with the bytes between them than one by one: a disk reads as much in the
    # time of opening a file.
    worthwhile_bytes = 64 * 1024

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def make(self) -> None:
        """Create the folder and its parents, durably."""
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.path))
        return []

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return (self.path / name).stat().st_size
        return None

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> FileRecord:
        path, digest, size = self.path / name, xxhash.xxh3_128(), 0
        try:
            with open(path, "xb", buffering=0) as file:
                for block in _blocks(parts):
                    digest.update(block)
                    while block:
                        count = calls.write(file.fileno(), block, path)
                        size, block = size + count, block[count:]
                calls.fsync(file.fileno(), path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                way = "free space there, or save to another folder"
                raise OSError(
                    error.errno, f"{error.strerror} after {size} bytes; {way}", str(path)
                ) from error
            raise
        return FileRecord(size, digest.hexdigest())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with open(open_file(self.path / name), "rb", buffering=0) as file:
            stop = os.fstat(file.fileno()).st_size if stop is None else stop
            parts = []
            while start < stop:
                part = os.pread(file.fileno(), min(stop - start, MAX_CALL_BYTES), start)
                if not part:
                    break
                start += len(part)
                parts.append(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def rename(self, name: str, to: str) -> None:
        """Rename a folder atomically and durably; an existing target is an error."""
        sync_folder(self.path / name)
        calls.rename(self.path / name, self.path / to)
        sync_folder(self.path)

    def remove(self, name: str) -> None:
        calls.remove(self.path / name)


class RemoteFolder:
    """A folder at an fsspec URL: files appear complete or not at all, folders are only prefixes of names."""

    renames = False
    worthwhile_bytes = 4 * 2**20  # a store sends as much in the time of one request

    def __init__(self, system: Any, path: str, protocol: str) -> None:
        self._system, self._path, self._protocol = system, path.rstrip("/"), protocol

    @staticmethod
    def open(url: str) -> RemoteFolder:
        from fsspec.core import url_to_fs

        try:
            system, path = url_to_fs(url)
        except ImportError as error:
            raise ValueError(f"{url} needs a package that is not installed: {error}") from error
        return RemoteFolder(system, path, url.split("://", 1)[0])

    def __str__(self) -> str:
        return f"{self._protocol}://{self._path.lstrip('/')}"

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._system, f"{self._path}/{name}", self._protocol)

    def make(self) -> None:
        # Object stores have no folders; other file systems of fsspec need them created.
        self._system.makedirs(self._path, exist_ok=True)

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            listed = self._system.ls(self._path, detail=False)
            return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed})
        return []

    def size(self, name: str) -> int | None:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            return int(self._system.size(f"{self._path}/{name}"))
        return None

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> FileRecord:
        digest, size = xxhash.xxh3_128(), 0
        with self._system.open(f"{self._path}/{name}", "wb") as file:
            for block in _blocks(parts):
                file.write(block)
                digest.update(block)
                size += len(block)
        return FileRecord(size, digest.hexdigest())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and start >= stop:
            return b""
        return bytes(self._system.cat_file(f"{self._path}/{name}", start=start, end=stop))

    def rename(self, name: str, to: str) -> None:
        # File by file: what `mv` does with a folder differs between stores.
        self.child(to).make()
        for file in self.child(name).names():
            self._system.cp_file(f"{self._path}/{name}/{file}", f"{self._path}/{to}/{file}")
        self.remove(name)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm(f"{self._path}/{name}", recursive=True)


Folder = LocalFolder | RemoteFolder


def _blocks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), MAX_CALL_BYTES):
            yield view[start : start + MAX_CALL_BYTES]


def sync_folder(path: Path) -> None:
    """Sync a folder: only then are the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        calls.fsync(descriptor, path)
    finally:
        os.close(descriptor)
