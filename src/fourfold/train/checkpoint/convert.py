"""From a checkpoint to a Hugging Face folder, without the model, its grid or its ranks: tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.train.checkpoint.folder import Folder
from fourfold.train.checkpoint.index import tensors
from fourfold.train.checkpoint.manifest import Damaged, dump_json, read_json
from fourfold.train.checkpoint.state import MODEL
from fourfold.train.checkpoint.storage import VALUES, Reader, lay_out, raw_bytes, read_rectangles

FILE_BYTES = 5 * 10**9  # as save_pretrained does


@dataclass
class _Whole:
    """A Hugging Face tensor, and the parameters that are parts of it with where they begin in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[str, tuple[int, ...]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def convert(
    root: Folder, step: int, out: Folder, *, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> list[str]:
    """Write the weights of ``step`` to ``out`` as `from_pretrained` reads them; the names of the files.

    ``dtype`` casts the floating-point numbers. One tensor is in memory at a time.
    """
    if taken := out.names():
        raise FileExistsError(f"{out} has {len(taken)} files, {taken[0]} among them; give an empty folder")
    reader = Reader(root, step)
    values = read_json(reader.folder, VALUES)
    wholes = _wholes(reader, values, dtype)
    files: list[list[str]] = [[]]
    size = 0
    for name, whole in wholes.items():
        if files[-1] and size + whole.bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += whole.bytes
    out.make()
    written, weight_map = [], {}
    for i, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors"
        out.write(file, _parts(reader, {name: wholes[name] for name in names}))
        written.append(file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(w.bytes for w in wholes.values())}, "weight_map": weight_map}
        written.append("model.safetensors.index.json")
        out.write(written[-1], [dump_json(index)])
    if values["model"] is not None:
        written.append("config.json")
        out.write("config.json", [dump_json(values["model"])])
    return written


def _wholes(reader: Reader, values: dict[str, Any], dtype: torch.dtype | None) -> dict[str, _Whole]:
    wholes: dict[str, _Whole] = {}
    for full_name, tensor in tensors(reader.metadata).items():
        if not full_name.startswith(MODEL):
            continue
        name = full_name.removeprefix(MODEL)
        here = values["layouts"].get(
            name, {"hf_name": name, "hf_shape": list(tensor.size), "start": [0] * len(tensor.size)}
        )
        stored = tensor.properties.dtype
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        whole = wholes.setdefault(here["hf_name"], _Whole(tuple(here["hf_shape"]), wanted, {}))
        whole.parts[full_name] = tuple(here["start"])
    for name, whole in wholes.items():
        found = sum(math.prod(tensors(reader.metadata)[part].size) for part in whole.parts)
        if found != math.prod(whole.shape):
            raise Damaged(f"{reader.folder}: has {found} of the {math.prod(whole.shape)} numbers of {name}")
    return wholes


def _parts(reader: Reader, wholes: dict[str, _Whole]) -> Iterator[bytes | memoryview]:
    empty = {n: torch.empty(w.shape, dtype=w.dtype, device="meta") for n, w in wholes.items()}
    header, ranges = lay_out(empty)
    yield header
    for name in ranges:
        yield raw_bytes(_read(reader, wholes[name]))


def _read(reader: Reader, whole: _Whole) -> Tensor:
    tensor = torch.empty(whole.shape, dtype=whole.dtype)
    for name, start in whole.parts.items():
        for offset, piece in read_rectangles(reader, name):
            index = tuple(
                slice(s + o, s + o + n) for s, o, n in zip(start, offset, piece.shape, strict=True)
            )
            tensor[index] = piece.to(whole.dtype)
    return tensor
