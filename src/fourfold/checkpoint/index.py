"""The index: which tensors a checkpoint has, and in which bytes of which file their pieces are. JSON, never pickle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fourfold.checkpoint.folder import Folder
from fourfold.checkpoint.manifest import CorruptCheckpointError, dump_json, read_json
from fourfold.hf.safetensors_reader import DTYPES as NUMBERS
from fourfold.hf.safetensors_reader import MAX_DIMS
from fourfold.untrusted_input import natural, plain_name

INDEX = "index.json"
DTYPES = NUMBERS | {"BOOL": torch.bool}
MAX_EMPTY = 1 << 31
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ByteRange:
    """Where a piece lies: bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int


def byte_ranges(metadata: Metadata) -> dict[MetadataIndex, ByteRange]:
    return cast(dict[MetadataIndex, ByteRange], metadata.storage_data)


def tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


def write_index(metadata: Metadata, stored: dict[MetadataIndex, ByteRange]) -> bytes:
    table = {
        name: {
            "dtype": DTYPE_NAMES[tensor.properties.dtype],
            "shape": list(tensor.size),
            "pieces": [_piece(name, chunk, stored) for chunk in tensor.chunks],
        }
        for name, tensor in tensors(metadata).items()
    }
    return dump_json({"tensors": table})


def _piece(name: str, chunk: ChunkStorageMetadata, stored: dict[MetadataIndex, ByteRange]) -> dict[str, Any]:
    where = stored[MetadataIndex(name, chunk.offsets)]
    return {
        "offset": list(chunk.offsets),
        "shape": list(chunk.sizes),
        "file": where.file,
        "bytes": [where.start, where.stop],
    }


def read_index(folder: Folder, sizes: dict[str, int]) -> Metadata:
    """The index of a checkpoint whose files have these ``sizes``, as DCP's planners want it."""
    table = read_json(folder, INDEX).get("tensors")
    if not isinstance(table, dict):
        raise CorruptCheckpointError(f"{folder}/{INDEX}: has no table of tensors")
    stored: dict[MetadataIndex, ByteRange] = {}
    found = {}
    for name, fields in table.items():
        try:
            found[name] = _read_tensor(name, fields, sizes, stored)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{folder}/{INDEX}: {name!r:.200} is not sound ({error!r:.200})"
            ) from error
    return Metadata(found, storage_data=stored)  # type: ignore[arg-type]


def _read_tensor(
    name: str, fields: Any, sizes: dict[str, int], stored: dict[MetadataIndex, ByteRange]
) -> TensorStorageMetadata:
    dtype, whole = DTYPES[fields["dtype"]], _naturals(fields["shape"])
    if not math.prod(whole) and math.prod(n or 1 for n in whole) > MAX_EMPTY:
        # No file is too short for it, and who reads it row by row would never end.
        raise ValueError(f"nothing, in the shape {list(whole)}")
    chunks = []
    for piece in fields["pieces"]:
        offset, shape = _naturals(piece["offset"]), _naturals(piece["shape"])
        start, stop = _naturals(piece["bytes"])
        file = plain_name(piece["file"])
        if any(o + n > size for o, n, size in zip(offset, shape, whole, strict=True)):
            raise ValueError(f"a piece of {list(shape)} at {list(offset)} does not lie in {list(whole)}")
        if not start <= stop <= sizes[file] or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{list(shape)} of {dtype} does not lie in bytes {start} to {stop} of {sizes[file]}"
            )
        chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
        stored[MetadataIndex(name, offset)] = ByteRange(file, start, stop)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(whole) or _overlap(chunks):
        raise ValueError(f"its {len(chunks)} pieces do not make up {list(whole)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(whole), chunks)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Do two pieces share a number? Then, for all their size, another one is in none."""
    boxes = [
        [(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        for chunk in chunks
        if math.prod(chunk.sizes)
    ]
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    # From one end to the other along the dim that is cut most: only what is open at the same time is compared.
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d] for box in boxes}))
    now: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        now = [other for other in now if other[dim][1] > box[dim][0]]
        for other in now:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
        now.append(box)
    return False


def _naturals(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(natural(n) for n in values)
    if len(found) > MAX_DIMS:
        raise ValueError(f"{len(found)} dims are more than {MAX_DIMS}")
    return found
