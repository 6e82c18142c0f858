"""Reads documents or chats from text, JSON lines, Parquet and Arrow files, in chunks that can be read independently."""

from __future__ import annotations

import gzip
import json
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["text", "json", "parquet", "arrow"]

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


@dataclass(frozen=True)
class Reading:
    """How documents are found in files."""

    column: str = "text"  # of JSON lines, Parquet and Arrow
    separator: str | None = None  # between the documents of a text file; None: a file is one document
    chats: bool = False  # records of messages, or of a prompt and its completion, instead of text


@dataclass(frozen=True)
class FileChunk:
    """The documents that start in [first, stop): bytes of text and JSON, row groups of Parquet, batches of Arrow."""

    path: str
    kind: Kind
    first: int
    stop: int
    bytes: int


def kind_of(path: Path) -> Kind | None:
    """The kind of a file by its suffix, also of a gzip file; None for an unknown suffix."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def split_file(path: Path, kind: Kind, reading: Reading, bytes_each: int) -> list[FileChunk]:
    """Split a file into chunks of about ``bytes_each`` bytes, the same in every process."""
    size = path.stat().st_size
    if kind in ("parquet", "arrow"):
        sizes = _table_sizes(path, kind)
    elif _cannot_be_split(path, kind, reading):
        return [FileChunk(str(path), kind, 0, size, size)]
    else:
        return [
            FileChunk(str(path), kind, first, min(first + bytes_each, size), min(bytes_each, size - first))
            for first in range(0, size, bytes_each)
        ]
    found, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        held += size
        if held >= bytes_each or number == len(sizes) - 1:
            found.append(FileChunk(str(path), kind, first, number + 1, held))
            first, held = number + 1, 0
    return found


def documents(chunk: FileChunk, reading: Reading) -> Iterator[str]:
    """The non-empty texts of a chunk."""
    if chunk.kind in ("parquet", "arrow"):
        texts = _table_texts(chunk, reading.column)
    elif chunk.kind == "json":
        texts = (_field(record, chunk.path, reading.column) for _, record in _objects(chunk))
    else:
        separator = reading.separator.encode() if reading.separator is not None else None
        texts = (_decoded(record, chunk.path, at) for at, record in _records(chunk, separator))
    return (text for text in texts if text)


def texts_of(part: Iterable[FileChunk], reading: Reading) -> Iterator[str]:
    for chunk in part:
        yield from documents(chunk, reading)


def records_of(part: Iterable[FileChunk]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it is, all of its fields) of each record."""
    for chunk in part:
        if chunk.kind == "text":
            raise ValueError(
                f"{chunk.path} is text; chats are read from JSON lines (.jsonl), Parquet and Arrow, a chat in each record"
            )
        if chunk.kind == "json":
            yield from ((f"{chunk.path}, byte {at}", record) for at, record in _objects(chunk))
            continue
        for number, batch in _batches(chunk):
            rows = batch.to_pylist()
            yield from ((f"{chunk.path}, row {i} of part {number}", row) for i, row in enumerate(rows))


# -- text and JSON lines ------------------------------------------------------------------------------------------


def _cannot_be_split(path: Path, kind: Kind, reading: Reading) -> bool:
    """Can the starts of documents only be found by reading the file from its beginning?"""
    if path.suffix.lower() == ".gz":
        return True
    if kind == "json":
        return False
    separator = reading.separator
    # A separator that overlaps itself, like two newlines, is found elsewhere if the search starts elsewhere.
    return separator is None or any(separator.endswith(separator[:n]) for n in range(1, len(separator)))


def _records(chunk: FileChunk, separator: bytes | None) -> Iterator[tuple[int, bytes]]:
    """(start, bytes up to the next separator) of each record that starts in the chunk."""
    if chunk.stop == 0:
        return
    if chunk.path.lower().endswith(".gz"):
        with gzip.open(chunk.path) as packed:
            yield from _split(packed.read(), 0, None, separator)
        return
    with open(chunk.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield from _split(data, chunk.first, chunk.stop, separator)


def _split(
    data: bytes | mmap.mmap, first: int, stop: int | None, separator: bytes | None
) -> Iterator[tuple[int, bytes]]:
    if separator is None:
        yield 0, bytes(data[:])
        return
    begin, stop = first, len(data) if stop is None else stop
    if first:
        at = data.find(separator, max(0, first - len(separator)))
        begin = at + len(separator) if at >= 0 else stop
    while begin < stop:
        at = data.find(separator, begin)
        end = at if at >= 0 else len(data)
        yield begin, data[begin:end]
        begin = end + len(separator)


def _decoded(record: bytes, path: str, at: int) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text at byte {at + error.start} ({error.reason}); convert it, or leave it out"
        ) from None


def _objects(chunk: FileChunk) -> Iterator[tuple[int, dict[str, Any]]]:
    """(start, fields) of each line of JSON."""
    path = chunk.path
    for at, record in _records(chunk, b"\n"):
        if not record.strip():
            continue
        try:
            value = json.loads(record)
        except ValueError as error:
            raise ValueError(
                f"{path} has a line at byte {at} that is not JSON ({error}); it needs one JSON object per line"
            ) from None
        if not isinstance(value, dict):
            raise ValueError(
                f"{path} has {type(value).__name__} at byte {at}, not an object; it needs one JSON object per line"
            )
        yield at, value


def _field(value: dict[str, Any], path: str, column: str) -> str:
    if column not in value:
        raise ValueError(_no_column(path, column, sorted(value)))
    text = _as_text(value[column], path, column)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can contain half of a surrogate pair, which is not a character
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# -- tables -------------------------------------------------------------------------------------------------------


def _table_sizes(path: Path, kind: Kind) -> list[int]:
    """Bytes of each row group or record batch."""
    if kind == "parquet":
        metadata = _pyarrow("pyarrow.parquet").ParquetFile(path).metadata
        return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return [batch.nbytes for batch in _arrow_batches(str(path))]


def _table_texts(chunk: FileChunk, column: str) -> Iterator[str]:
    for _, batch in _batches(chunk, column):
        for value in batch.column(column):
            yield _as_text(value.as_py(), chunk.path, column)


def _batches(chunk: FileChunk, column: str | None = None) -> Iterator[tuple[int, Any]]:
    """(number of the row group or record batch, rows of it); all columns unless one is named."""
    if chunk.kind == "parquet":
        file = _pyarrow("pyarrow.parquet").ParquetFile(chunk.path)
        names = file.schema_arrow.names
        if column is not None and column not in names:
            raise ValueError(_no_column(chunk.path, column, names))
        columns = None if column is None else [column]
        for number in range(chunk.first, chunk.stop):
            yield from ((number, b) for b in file.iter_batches(row_groups=[number], columns=columns))
        return
    for number, batch in enumerate(_arrow_batches(chunk.path)):
        if chunk.first <= number < chunk.stop:
            if column is not None and column not in batch.schema.names:
                raise ValueError(_no_column(chunk.path, column, batch.schema.names))
            yield number, batch


def _arrow_batches(path: str) -> Iterator[Any]:
    """The record batches of an Arrow stream, the format of Hugging Face datasets; mapped, so skipping is free."""
    pyarrow = _pyarrow("pyarrow")
    with pyarrow.memory_map(path) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        yield from stream


def _pyarrow(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError("Parquet and Arrow are read with pyarrow: pip install 'fourfold[data]'") from None


def _as_text(value: Any, path: str, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{path}: field {column!r} holds {type(value).__name__}, not text; name another with --column"
        )
    return value


def _no_column(path: str, column: str, names: list[str]) -> str:
    chats = "; if it has chats, use --chats" if {"messages", "conversations", "prompt"} & set(names) else ""
    return f"{path} has no field {column!r}; name one with --column, it has {', '.join(names)}{chats}"
