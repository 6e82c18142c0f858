"""The index: the tensors of a checkpoint, and the byte ranges of their chunks in its files. JSON, never pickle."""

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
from fourfold.hf.safetensors_reader import DTYPES as NUMERIC_DTYPES
from fourfold.hf.safetensors_reader import MAX_DIMS
from fourfold.untrusted_input import natural, plain_name

INDEX = "index.json"
DTYPES = NUMERIC_DTYPES | {"BOOL": torch.bool}
MAX_EMPTY = 1 << 31
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
