"""From a checkpoint to a Hugging Face folder, without the model, its grid or its ranks: tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fourfold.train.checkpoint.folder import Folder
from fourfold.train.checkpoint.index import tensors
from fourfold.train.checkpoint.manifest import dump_json, read_json
from fourfold.train.checkpoint.state import MODEL
from fourfold.train.checkpoint.storage import VALUES, Reader, lay_out, raw_bytes, read_rectangles

FILE_BYTES = 5 * 10**9  # as save_pretrained does


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
    weights = _weights(reader, dtype)
    files: list[list[str]] = [[]]
    size = 0
    for name, empty in weights.items():
        if files[-1] and size + empty.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += empty.nbytes
    out.make()
    written: list[str] = []
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors"
        out.write(file, _parts(reader, {name: weights[name] for name in names}))
        written.append(file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(e.nbytes for e in weights.values())},
            "weight_map": weight_map,
        }
        written.append("model.safetensors.index.json")
        out.write(written[-1], [dump_json(index)])
    if values["model"] is not None:
        written.append("config.json")
        out.write("config.json", [dump_json(values["model"])])
    return written


def _weights(reader: Reader, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors to write, on meta."""
    weights = {}
    for name, tensor in tensors(reader.metadata).items():
        if name.startswith(MODEL):
            stored = tensor.properties.dtype
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            weights[name.removeprefix(MODEL)] = torch.empty(tensor.size, dtype=wanted, device="meta")
    return weights


def _parts(reader: Reader, weights: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    header, ranges = lay_out(weights)
    yield header
    for name in ranges:
        yield raw_bytes(_read(reader, name, weights[name]))


def _read(reader: Reader, name: str, like: Tensor) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype)
    for offset, piece in read_rectangles(reader, f"{MODEL}{name}"):
        index = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
        tensor[index] = piece.to(like.dtype)
    return tensor
