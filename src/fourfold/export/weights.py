"""Writes the weights of a checkpoint as Hugging Face safetensors, holding only a few rows of a tensor in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from fourfold.checkpoint.folder import Folder
from fourfold.checkpoint.manifest import dump_json
from fourfold.checkpoint.state import MODEL
from fourfold.checkpoint.storage import Reader, raw_bytes, read_rows, safetensors_header, tensors
from fourfold.parallel.lora import PEFT_PREFIX

FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """What was written: parameters and bytes of all tensors, and their widest dtype."""

    files: tuple[str, ...]
    parameters: int
    bytes: int
    dtype: torch.dtype


def write_weights(
    reader: Reader,
    out: Folder,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    of_adapters: bool = False,
) -> Weights:
    """Write the model of a checkpoint to ``out``, or its adapters, in PEFT's one file; ``dtype`` casts the floating-point tensors.

    Names are those of Hugging Face, as in the checkpoint; tied weights are written once.
    """
    weights = _on_meta(reader, dtype)
    if not weights:
        raise ValueError(f"{reader.folder} has no tensors of a model")
    if of_adapters:
        file_bytes = sum(empty.nbytes for empty in weights.values()) + 1
    split = split_torch_state_dict_into_shards(
        weights,
        max_shard_size=file_bytes,
        filename_pattern="adapter_model{suffix}.safetensors" if of_adapters else "model{suffix}.safetensors",
    )
    prefix = PEFT_PREFIX if of_adapters else ""
    for file, names in split.filename_to_tensors.items():
        out.write(file, _content(reader, {name: weights[name] for name in names}, prefix))
    files = list(split.filename_to_tensors)
    parameters = sum(math.prod(empty.shape) for empty in weights.values())
    size = sum(empty.nbytes for empty in weights.values())
    if split.is_sharded:
        metadata = {"total_parameters": parameters, "total_size": size}
        out.write(INDEX, [dump_json({"metadata": metadata, "weight_map": split.tensor_to_filename})])
        files.append(INDEX)
    floating = [empty.dtype for empty in weights.values() if empty.dtype.is_floating_point]
    widest = max(floating, key=lambda d: (d.itemsize, d == torch.bfloat16), default=torch.float32)
    return Weights(tuple(files), parameters, size, widest)


def _on_meta(reader: Reader, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors to write, on the meta device."""
    weights = {}
    for name, tensor in tensors(reader.metadata).items():
        if name.startswith(MODEL):
            stored = tensor.properties.dtype
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            weights[name.removeprefix(MODEL)] = torch.empty(tensor.size, dtype=wanted, device="meta")
    return weights


def _content(reader: Reader, weights: dict[str, Tensor], prefix: str) -> Iterator[bytes | memoryview]:
    header, ranges = safetensors_header({f"{prefix}{name}": empty for name, empty in weights.items()})
    yield header
    for written in ranges:
        name = written.removeprefix(prefix)
        for rows in read_rows(reader, f"{MODEL}{name}", weights[name].dtype):
            yield raw_bytes(rows)
