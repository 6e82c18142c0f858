"""Writes the weights of a checkpoint as Hugging Face safetensors, holding only a few rows of a tensor in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel

from fourfold.checkpoint.folder import Folder
from fourfold.checkpoint.manifest import dump_json
from fourfold.checkpoint.state import MODEL
from fourfold.checkpoint.storage import (
    Reader,
    by_rows,
    raw_bytes,
    read_slice,
    safetensors_header,
    tensors,
)
from fourfold.hf.hub_format import in_hub_format
from fourfold.hf.lazy_tensor import LazyTensor
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
    stock: PreTrainedModel | None = None,
) -> Weights:
    """Write the model of a checkpoint to ``out``, or its adapters, in PEFT's one file; ``dtype`` casts the floating-point tensors.

    Names and tensors are those that `save_pretrained` of the ``stock`` model writes; without one they are as in the checkpoint. Tied
    weights are written once.
    """
    weights = _lazy(reader, dtype)
    if stock is not None:
        weights = in_hub_format(stock, weights)
    if not weights:
        raise ValueError(f"{reader.folder} has no tensors of a model")
    if of_adapters:
        file_bytes = sum(lazy.numel() * lazy.dtype.itemsize for lazy in weights.values()) + 1
    split = split_torch_state_dict_into_shards(
        empty(weights),
        max_shard_size=file_bytes,
        filename_pattern="adapter_model{suffix}.safetensors" if of_adapters else "model{suffix}.safetensors",
    )
    prefix = PEFT_PREFIX if of_adapters else ""
    for file, names in split.filename_to_tensors.items():
        out.write(file, _content({name: weights[name] for name in names}, prefix))
    files = list(split.filename_to_tensors)
    parameters = sum(math.prod(lazy.shape) for lazy in weights.values())
    size = sum(lazy.numel() * lazy.dtype.itemsize for lazy in weights.values())
    if split.is_sharded:
        metadata = {"total_parameters": parameters, "total_size": size}
        out.write(INDEX, [dump_json({"metadata": metadata, "weight_map": split.tensor_to_filename})])
        files.append(INDEX)
    floating = [lazy.dtype for lazy in weights.values() if lazy.dtype.is_floating_point]
    widest = max(floating, key=lambda d: (d.itemsize, d == torch.bfloat16), default=torch.float32)
    return Weights(tuple(files), parameters, size, widest)


def _lazy(reader: Reader, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """The tensors of the model, in the dtype to write."""
    weights = {}
    for name, tensor in tensors(reader.metadata).items():
        if name.startswith(MODEL):
            stored = tensor.properties.dtype
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            read = functools.partial(read_slice, reader, name)
            weights[name.removeprefix(MODEL)] = LazyTensor.of(tensor.size, wanted, read, frozenset((name,)))
    return weights


def empty(weights: Mapping[str, LazyTensor]) -> dict[str, Tensor]:
    """Plain tensors on the meta device, of the same shapes and dtypes."""
    return {n: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta") for n, lazy in weights.items()}


def _content(weights: dict[str, LazyTensor], prefix: str) -> Iterator[bytes | memoryview]:
    header, ranges = safetensors_header({f"{prefix}{name}": t for name, t in empty(weights).items()})
    yield header
    for written in ranges:
        lazy = weights[written.removeprefix(prefix)]
        for rows in by_rows(lazy.shape, lazy.dtype, lazy.read_into):
            yield raw_bytes(rows)
