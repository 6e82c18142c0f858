"""Reading pieces of the tensors of a Hugging Face safetensors checkpoint: only their bytes, never a whole tensor."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fourfold.untrusted_input import open_file

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_DIMS = 64  # the limit of PyTorch
STAGING_BYTES = 4 * 2**20  # at most two such buffers live at a time: one to cast, one to slice rows

# Pieces of rows shorter than this are sliced out of whole rows in memory; unless the rows are so long that reading
# them costs more than a call for each piece (4 microseconds, or 16 KB from the page cache and less from a disk).
TINY_RUN_BYTES = 1024
LONG_ROW_BYTES = 8 * 1024

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies in a file: bytes [start, stop) from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class _File:
    path: Path
    descriptor: int
    entries: dict[str, _Entry]


class CheckpointFiles:
    """The tensors of `model.safetensors`, of a sharded `model.safetensors.index.json`, or of one `.safetensors` file.

    Files are opened when first needed and read with `pread`, not mapped: mapped pages count as a process's memory.
    `path` is the file or index found, `bytes_read` counts the tensor bytes read so far.
    """

    def __init__(self, folder_or_file: str | os.PathLike[str]) -> None:
        self.bytes_read = 0
        self._files: dict[Path, _File] = {}
        self._closed = False
        self.path = _locate(Path(folder_or_file))
        self._file_of: dict[str, Path]
        if self.path.name.endswith(".json"):
            self._file_of = _parse_index(self.path)
        else:
            self._file_of = dict.fromkeys(self._file(self.path).entries, self.path)

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        file, entry = self._find(name)
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{file.path}: {name} has dtype {entry.dtype}, which is not supported; "
                f"convert it to one of {', '.join(DTYPES)}"
            )
        return DTYPES[entry.dtype]

    def read_into(self, name: str, out: Tensor, index: tuple[slice, ...]) -> None:
        """Fill `out`, of any device, dtype and strides, with the piece `index` of tensor `name`.

        A contiguous CPU tensor of the file's dtype is read into directly; any other through a buffer of
        `STAGING_BYTES`, part by part.
        """
        file, entry = self._find(name)
        dtype = self.dtype(name)
        bounds = [(piece.start, piece.stop) for piece in index]
        if len(bounds) != len(entry.shape) or any(
            not 0 <= lo <= hi <= n for (lo, hi), n in zip(bounds, entry.shape, strict=True)
        ):
            raise ValueError(
                f"{file.path}: index {bounds} does not lie in the shape {list(entry.shape)} of {name}"
            )
        if list(out.shape) != [hi - lo for lo, hi in bounds]:
            raise ValueError(
                f"{file.path}: a piece {bounds} of {name} does not fit a tensor of shape {list(out.shape)}"
            )
        if out.numel() == 0:
            return
        if not bounds:  # a scalar is a row of one
            entry, bounds, out = _Entry(entry.dtype, (1,), entry.start, entry.stop), [(0, 1)], out.view(1)
        self._read(file, entry, dtype, out.detach(), bounds)

    def close(self) -> None:
        self._closed = True
        while self._files:
            os.close(self._files.popitem()[1].descriptor)

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> tuple[_File, _Entry]:
        if name not in self._file_of:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        file = self._file(self._file_of[name])
        if name not in file.entries:
            raise ValueError(f"{self.path}: says that {file.path.name} holds {name}, but it does not")
        return file, file.entries[name]

    def _file(self, path: Path) -> _File:
        if self._closed:
            raise ValueError(f"{self.path}: is closed")
        if path not in self._files:
            try:
                descriptor = open_file(path)
            except OSError as error:
                raise ValueError(f"{path}: cannot be opened ({error.strerror or error})") from error
            try:
                self._files[path] = _File(path, descriptor, _parse_header(path, descriptor))
            except BaseException:
                os.close(descriptor)
                raise
        return self._files[path]

    def _read(
        self, file: _File, entry: _Entry, dtype: torch.dtype, out: Tensor, bounds: list[tuple[int, int]]
    ) -> None:
        if out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
            self._read_directly(file, entry, out, bounds)
            return
        if out.numel() * dtype.itemsize <= STAGING_BYTES:
            staging = torch.empty(out.shape, dtype=dtype)
            self._read_directly(file, entry, staging, bounds)
            out.copy_(staging)
            return
        dim = next(d for d, size in enumerate(out.shape) if size > 1)
        each = out.numel() // out.shape[dim] * dtype.itemsize
        step = max(1, STAGING_BYTES // each)
        lo, hi = bounds[dim]
        for start in range(lo, hi, step):
            stop = min(start + step, hi)
            part = out.narrow(dim, start - lo, stop - start)
            self._read(file, entry, dtype, part, [*bounds[:dim], (start, stop), *bounds[dim + 1 :]])

    def _read_directly(self, file: _File, entry: _Entry, out: Tensor, bounds: list[tuple[int, int]]) -> None:
        """A piece is a sequence of runs of bytes: one for each index of the dims before the last dim that is cut."""
        size, shape = out.dtype.itemsize, entry.shape
        strides = [math.prod(shape[d + 1 :]) * size for d in range(len(shape))]
        cut = max((d for d, (lo, hi) in enumerate(bounds) if hi - lo < shape[d]), default=0)
        run = (bounds[cut][1] - bounds[cut][0]) * strides[cut]
        origin = entry.start + bounds[cut][0] * strides[cut]
        target = out.reshape(-1).view(torch.uint8)

        # Runs that follow each other at the distance of one row are read together if they are tiny.
        rows = (bounds[cut - 1][1] - bounds[cut - 1][0]) if cut else 1
        row = strides[cut - 1] if cut else run
        together = 1
        if run < TINY_RUN_BYTES and row <= LONG_ROW_BYTES:
            together = min(rows, STAGING_BYTES // row)
        staging = torch.empty(together * row, dtype=torch.uint8) if together > 1 else target

        done = 0
        for outer in itertools.product(*(range(lo, hi) for lo, hi in bounds[: max(cut - 1, 0)])):
            start = origin + sum(i * stride for i, stride in zip(outer, strides, strict=False))
            start += bounds[cut - 1][0] * row if cut else 0
            for first in range(0, rows, together):
                count = min(together, rows - first)
                piece = target[done : done + count * run]
                if count == 1:
                    self._read_bytes(file, piece, start + first * row)
                else:
                    self._read_bytes(file, staging[: (count - 1) * row + run], start + first * row)
                    piece.view(count, run).copy_(staging[: count * row].view(count, row)[:, :run])
                done += count * run

    def _read_bytes(self, file: _File, target: Tensor, offset: int) -> None:
        view = target.numpy().data
        while view:  # the kernel may return less than asked, and never more than 2 GiB at once
            count = os.preadv(file.descriptor, [view], offset)
            if count == 0:
                raise ValueError(f"{file.path}: ends at byte {offset}, {len(view)} bytes too early")
            self.bytes_read += count
            offset += count
            view = view[count:]


def _locate(path: Path) -> Path:
    if path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json")):
        return path
    if not path.is_dir():
        raise ValueError(
            f"{path}: is neither a folder nor a .safetensors file nor a .safetensors.index.json file"
        )
    for name in ("model.safetensors", "model.safetensors.index.json"):  # the order of transformers
        if (path / name).is_file():
            return path / name
    raise ValueError(
        f"{path}: has neither model.safetensors nor model.safetensors.index.json; "
        "weights in pickle files are never loaded, save them with save_pretrained"
    )


def _parse_index(path: Path) -> dict[str, Path]:
    size = path.stat().st_size
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: has {size} bytes, more than the limit of {MAX_HEADER_BYTES}")
    weight_map = _parse_json(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: has no weight_map")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\:\0")
        if not plain:
            raise ValueError(
                f"{path}: {name} is in {file!r}, which is not the plain name of a .safetensors file"
            )
    return {name: path.parent / file for name, file in weight_map.items()}


def _parse_header(path: Path, descriptor: int) -> dict[str, _Entry]:
    """The table of a safetensors file: 8 bytes of length (little-endian), then JSON, then the tensors' bytes."""
    size = os.fstat(descriptor).st_size
    if size < 8:
        raise ValueError(f"{path}: has {size} bytes, and no room for the length of a header")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise ValueError(
            f"{path}: claims a header of {length} bytes; the file has {size}, the limit is {MAX_HEADER_BYTES}"
        )
    table = _parse_json(path, os.pread(descriptor, length, 8))
    table.pop("__metadata__", None)
    data = 8 + length
    entries = {name: _parse_entry(path, name, fields, data, size) for name, fields in table.items()}

    last_name, last = "", _Entry("", (), data, data)
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start == entry.stop:
            continue
        if entry.start < last.stop:
            raise ValueError(
                f"{path}: {name} begins at byte {entry.start}, before the end of {last_name} at {last.stop}"
            )
        last_name, last = name, entry
    return entries


def _parse_entry(path: Path, name: str, fields: Any, data: int, size: int) -> _Entry:
    def naturals(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    fields = fields if isinstance(fields, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    sound = isinstance(dtype, str) and naturals(shape) and naturals(offsets)
    if not (sound and len(offsets) == 2 and len(shape) <= MAX_DIMS):
        raise ValueError(f"{path}: {name} has no sound dtype, shape and data_offsets: {fields!r:.200}")
    start, stop = offsets
    if not start <= stop <= size - data:
        raise ValueError(f"{path}: {name} lies at bytes {start} to {stop} of {size - data}")
    if dtype in DTYPES:
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if stop - start != expected:
            raise ValueError(
                f"{path}: {name} has {stop - start} bytes, but its shape {shape!r:.200} of {dtype} needs {expected}"
            )
    return _Entry(dtype, tuple(shape), data + start, data + stop)


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a name appears twice")
        return table

    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: has no sound JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: has JSON of type {type(value).__name__} instead of an object")
    return value
