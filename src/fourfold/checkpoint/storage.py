"""Storage for `torch.distributed.checkpoint`: one safetensors file for each rank, read by byte ranges.

An index in JSON, never pickle, has the tensors and the byte ranges of their chunks in these files.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fourfold.checkpoint import commit
from fourfold.checkpoint.folder import FileRecord, Folder
from fourfold.checkpoint.manifest import CorruptCheckpointError, dump_json, read_json, read_manifest
from fourfold.checkpoint.state import VALUES
from fourfold.hf.safetensors_reader import DTYPES as NUMERIC_DTYPES
from fourfold.hf.safetensors_reader import MAX_DIMS
from fourfold.untrusted_input import natural, plain_name

INDEX = "index.json"
DTYPES = NUMERIC_DTYPES | {"BOOL": torch.bool}
MAX_EMPTY = 1 << 31
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
READ_BYTES = 16 * 2**20  # read at a time


@dataclass(frozen=True)
class ByteRange:
    """Where a chunk is stored: bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int


def byte_ranges(metadata: Metadata) -> dict[MetadataIndex, ByteRange]:
    return cast(dict[MetadataIndex, ByteRange], metadata.storage_data)


def tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


class _Storage:
    """The parts of DCP's interface of a storage that are the same for reading and writing: nothing is to be done."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class Writer(_Storage, StorageWriter):
    """Writes one checkpoint: ``values`` as JSON, and for each rank a file with the chunks that it was assigned."""

    def __init__(self, root: Folder, step: int, values: dict[str, Any]) -> None:
        self._root, self._step, self._values = root, step, values
        self._file = ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # Runs before ranks exchange their plans: no rank writes until the coordinator has done this.
        self._file = f"rank-{kwargs.get('rank', 0)}.safetensors"
        if is_coordinator:
            commit.begin(self._root, self._step)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        chunks = {item.index: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
        if not chunks:
            done.set_result([])
            return done
        names = _names_in_file(chunks)
        by_name = {names[index]: tensor for index, tensor in chunks.items()}
        header, ranges = safetensors_header(by_name)
        folder = commit.unfinished(self._root, self._step)
        content: Iterable[bytes | memoryview] = itertools.chain(
            [header], (raw_bytes(by_name[name]) for name in ranges)
        )
        record = folder.write(self._file, content)
        stored = {index: ByteRange(self._file, *ranges[names[index]]) for index in chunks}
        done.set_result([WriteResult(i, b.stop - b.start, (b, record)) for i, b in stored.items()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored: dict[MetadataIndex, ByteRange] = {}
        files: dict[str, FileRecord] = {}
        for result in itertools.chain.from_iterable(results):
            stored[result.index], record = result.storage_data
            files[stored[result.index].file] = record
        folder = commit.unfinished(self._root, self._step)
        files[INDEX] = folder.write(INDEX, [write_index(metadata, stored)])
        files[VALUES] = folder.write(VALUES, [dump_json(self._values)])
        commit.commit(self._root, self._step, files)


class Reader(_Storage, StorageReader):
    """Reads the parts of a committed checkpoint that a plan asks for."""

    def __init__(self, root: Folder, step: int) -> None:
        self.folder = root.child(commit.step_name(step))
        files = read_manifest(self.folder, step)
        self.metadata = read_index(self.folder, {name: record.size for name, record in files.items()})
        self.bytes_read = 0

    def read_metadata(self) -> Metadata:
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            self.read_into(target, item.storage_index, tuple(item.storage_offsets))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_into(self, target: Tensor, chunk: MetadataIndex, offset: tuple[int, ...]) -> None:
        """Fill ``target`` with the rectangle at ``offset`` of a stored chunk."""
        where = byte_ranges(self.metadata)[chunk]
        tensor = tensors(self.metadata)[chunk.fqn]
        shape = next(tuple(c.sizes) for c in tensor.chunks if c.offsets == chunk.offset)
        if target.ndim == 0:  # a scalar is a row of one
            target, shape, offset = target.view(1), (1,), (0,)
        self._read(target, where.file, where.start, tensor.properties.dtype, shape, offset)

    def _read(
        self,
        target: Tensor,
        file: str,
        start: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        offset: tuple[int, ...],
    ) -> None:
        """Read full rows and slice them in memory or, where that would read too much, read row by row."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        wanted_bytes = math.prod(target.shape[1:]) * dtype.itemsize
        if wanted_bytes < row_bytes and wanted_bytes >= self.folder.worthwhile_bytes:
            for i in range(target.shape[0]):
                at = start + (offset[0] + i) * row_bytes
                self._read(target[i], file, at, dtype, shape[1:], offset[1:])
            return
        rows_at_once = max(1, READ_BYTES // max(1, row_bytes))
        for first in range(0, target.shape[0], rows_at_once):
            part = target[first : first + rows_at_once]
            at = start + (offset[0] + first) * row_bytes
            raw = self._bytes(file, at, at + part.shape[0] * row_bytes)
            rows = raw.view(dtype).view(part.shape[0], *shape[1:])
            for dim in range(1, part.ndim):
                rows = rows.narrow(dim, offset[dim], part.shape[dim])
            part.copy_(rows)

    def _bytes(self, file: str, start: int, stop: int) -> Tensor:
        raw = self.folder.read(file, start, stop)
        if len(raw) != stop - start:
            raise ValueError(f"{self.folder}/{file}: ends {stop - start - len(raw)} bytes before byte {stop}")
        self.bytes_read += len(raw)
        # Other dtypes need aligned memory, which a new array has.
        return torch.from_numpy(np.frombuffer(raw, np.uint8).copy())


# -- the index ---------------------------------------------------------------------------------------------------------


def write_index(metadata: Metadata, stored: dict[MetadataIndex, ByteRange]) -> bytes:
    table = {
        name: {
            "dtype": DTYPE_NAMES[tensor.properties.dtype],
            "shape": list(tensor.size),
            "pieces": [_describe_chunk(name, chunk, stored) for chunk in tensor.chunks],
        }
        for name, tensor in tensors(metadata).items()
    }
    return dump_json({"tensors": table})


def _describe_chunk(
    name: str, chunk: ChunkStorageMetadata, stored: dict[MetadataIndex, ByteRange]
) -> dict[str, Any]:
    where = stored[MetadataIndex(name, chunk.offsets)]
    return {
        "offset": list(chunk.offsets),
        "shape": list(chunk.sizes),
        "file": where.file,
        "bytes": [where.start, where.stop],
    }


def read_index(folder: Folder, sizes: dict[str, int]) -> Metadata:
    """The index of a checkpoint whose files have these ``sizes``, as the metadata that DCP's planners take."""
    table = read_json(folder, INDEX).get("tensors")
    if not isinstance(table, dict):
        raise CorruptCheckpointError(f"{folder}/{INDEX}: has no object 'tensors'")
    stored: dict[MetadataIndex, ByteRange] = {}
    found = {}
    for name, fields in table.items():
        try:
            found[name] = _read_tensor(name, fields, sizes, stored)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{folder}/{INDEX}: {name!r:.200} is not valid ({error!r:.200})"
            ) from error
    return Metadata(found, storage_data=stored)  # type: ignore[arg-type]


def _read_tensor(
    name: str, fields: Any, sizes: dict[str, int], stored: dict[MetadataIndex, ByteRange]
) -> TensorStorageMetadata:
    dtype, shape_of_tensor = DTYPES[fields["dtype"]], _naturals(fields["shape"])
    if not math.prod(shape_of_tensor) and math.prod(n or 1 for n in shape_of_tensor) > MAX_EMPTY:
        # It needs no bytes, so no file is too short for it, but reading it row by row would never end.
        raise ValueError(f"an empty tensor of the shape {list(shape_of_tensor)} is too large")
    chunks = []
    for chunk in fields["pieces"]:
        offset, shape = _naturals(chunk["offset"]), _naturals(chunk["shape"])
        start, stop = _naturals(chunk["bytes"])
        file = plain_name(chunk["file"])
        if any(o + n > size for o, n, size in zip(offset, shape, shape_of_tensor, strict=True)):
            raise ValueError(
                f"a chunk of {list(shape)} at {list(offset)} is not within {list(shape_of_tensor)}"
            )
        if not start <= stop <= sizes[file] or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{list(shape)} of {dtype} does not fit bytes {start} to {stop} of {sizes[file]}"
            )
        chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
        stored[MetadataIndex(name, offset)] = ByteRange(file, start, stop)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape_of_tensor) or _overlap(chunks):
        raise ValueError(f"its {len(chunks)} chunks do not make up {list(shape_of_tensor)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape_of_tensor), chunks)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Do two chunks overlap? Then, as their sizes add up to the tensor's, another element is in none."""
    boxes = [
        [(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        for chunk in chunks
        if math.prod(chunk.sizes)
    ]
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    # Sweep along the dim that is split most: only chunks that are open at the same time are compared.
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d] for box in boxes}))
    active: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        active = [other for other in active if other[dim][1] > box[dim][0]]
        for other in active:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
        active.append(box)
    return False


def _naturals(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(natural(n) for n in values)
    if len(found) > MAX_DIMS:
        raise ValueError(f"{len(found)} dims are more than {MAX_DIMS}")
    return found


# -- safetensors -------------------------------------------------------------------------------------------------------


def _names_in_file(chunks: Iterable[MetadataIndex]) -> dict[MetadataIndex, str]:
    """The name of the tensor, with the offset if the rank has several chunks of it."""
    counts = Counter(index.fqn for index in chunks)
    return {
        index: index.fqn
        if counts[index.fqn] == 1
        else f"{index.fqn}@{','.join(map(str, index.offset or ()))}"
        for index in chunks
    }


def safetensors_header(tensors_to_write: dict[str, Tensor]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header of a safetensors file, and the byte range of each tensor in it, in file order."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ranges: dict[str, tuple[int, int]] = {}
    at = 0
    # Wide dtypes first, so that all tensors are aligned.
    for name, tensor in sorted(tensors_to_write.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}, which a checkpoint does not support; use one of {', '.join(map(str, DTYPE_NAMES))}"
            )
        ranges[name] = (at, at + tensor.numel() * tensor.dtype.itemsize)
        table[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": list(ranges[name]),
        }
        at = ranges[name][1]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: (len(header) + a, len(header) + b) for name, (a, b) in ranges.items()}


def raw_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_slice(reader: Reader, name: str, out: Tensor, index: tuple[slice, ...]) -> None:
    """Fill ``out`` with a slice of an unsharded tensor, from all chunks that have a part of it."""
    for chunk in tensors(reader.metadata)[name].chunks:
        first = [max(i.start, o) for i, o in zip(index, chunk.offsets, strict=True)]
        last = [min(i.stop, o + n) for i, o, n in zip(index, chunk.offsets, chunk.sizes, strict=True)]
        if all(a < b for a, b in zip(first, last, strict=True)):
            target = out[
                tuple(slice(a - i.start, b - i.start) for a, b, i in zip(first, last, index, strict=True))
            ]
            where = tuple(a - o for a, o in zip(first, chunk.offsets, strict=True))
            reader.read_into(target, MetadataIndex(name, chunk.offsets), where)


def by_rows(
    shape: Sequence[int], dtype: torch.dtype, read_into: Callable[[Tensor, tuple[slice, ...]], None]
) -> Iterator[Tensor]:
    """The rows of a tensor in ``dtype``, a few at a time, in one reused buffer; ``read_into`` fills it with a slice of them."""
    rows = shape[0] if shape else 1  # a scalar is a row of one
    rows_at_once = max(1, READ_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    buffer = torch.empty((min(rows_at_once, rows), *shape[1:]), dtype=dtype)
    for first in range(0, rows, rows_at_once):
        part = buffer[: min(rows_at_once, rows - first)]
        if shape:
            read_into(part, (slice(first, first + part.shape[0]), *(slice(0, n) for n in shape[1:])))
        else:
            read_into(part[0], ())
        yield part


def read_rows(reader: Reader, name: str, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The rows of an unsharded tensor in ``dtype``, a few at a time."""
    tensor = tensors(reader.metadata)[name]
    return by_rows(tensor.size, dtype or tensor.properties.dtype, functools.partial(read_slice, reader, name))
