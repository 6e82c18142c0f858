"""The whole tensors of a running model, one at a time, and the folder that they are written to; of LoRA, merged or apart."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.checkpoint.manifest import dump_json
from fourfold.export.folder import CONFIG, for_transformers_4
from fourfold.export.weights import FILE_BYTES, INDEX, empty
from fourfold.hf.hub_format import in_hub_format, stock_model
from fourfold.hf.lazy_tensor import LazyTensor
from fourfold.hf.parameter_layout import ParameterLayout
from fourfold.mesh import agreements
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.parallel.lora import CONFIG as ADAPTER_CONFIG
from fourfold.parallel.lora import PEFT_PREFIX, WEIGHTS, A, B, is_adapter
from fourfold.parallel.report import Report
from fourfold.weights.nf4 import dequantize, is_packed


def full_parameters(model: nn.Module, report: Report) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor of the Hugging Face model: parameters, tied ones once, and persistent buffers.

    Adapters of LoRA are merged into the weights, which are dequantised before if they are in NF4. All ranks walk through it together, and each has the whole tensor until it asks for the next one.

    Example:
        >>> {name: tensor.shape for name, tensor in full_parameters(model, report)}["lm_head.weight"]
        torch.Size([131, 16])
    """
    adapters = dict(_whole(model, report, is_adapter))
    for name, whole in _whole(model, report, _is_base):
        linear = name.removesuffix(".weight")
        if (a := adapters.get(f"{linear}.{A}.weight")) is not None:
            assert report.lora is not None
            change = report.lora.scale * (adapters[f"{linear}.{B}.weight"] @ a)
            module: Any = model.get_submodule(linear)
            whole = (whole.float() + (change.t() if module.transposed else change)).to(whole.dtype)
        yield name, whole


def _is_base(name: str) -> bool:
    return not is_adapter(name)


def _whole(
    model: nn.Module, report: Report, is_wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    for hf_name, pieces in _pieces(model, report, is_wanted).items():
        whole: Tensor | None = None
        for piece, layout in pieces:
            if layout is None:
                whole = piece
                continue
            local = piece.to_local() if isinstance(piece, DTensor) else piece
            if is_packed(local):
                local = dequantize(local, torch.float32)
            if whole is None:
                whole = local.new_empty(layout.hf_shape)
            for shard, values in _of_all_ranks(local, layout, report.grid):
                layout.of(whole, shard).copy_(values)
        assert whole is not None
        yield hf_name, whole


def _pieces(
    model: nn.Module, report: Report, is_wanted: Callable[[str], bool]
) -> dict[str, list[tuple[Tensor, ParameterLayout | None]]]:
    """The parameters that a Hugging Face tensor is in, with their layouts; or a persistent buffer, without."""
    # FSDP2 may hold unsharded weights after an evaluation; its state dict hooks reshard them.
    state = model.state_dict()
    parts: dict[str, list[tuple[Tensor, ParameterLayout | None]]] = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        if name in state and state[name].numel():
            layout = report.layouts.get(name)
            hf_name = name if layout is None else layout.hf_name
            if is_wanted(hf_name):
                parts.setdefault(hf_name, []).append((state[name].detach(), layout))
    return parts


def _of_all_ranks(
    local: Tensor, layout: ParameterLayout, grid: Grid
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """(slice of the parameter, values) of every shard."""
    axes: list[Axis] = [axis for axis in ("x", "y", "z") if axis == "z" or axis in layout.cuts]
    axes = [axis for axis in axes if grid.size(axis) > 1]
    coordinates = list(itertools.product(*(range(grid.size(axis)) for axis in reversed(axes))))
    here: dict[Axis, int] = {axis: grid.coordinate(axis) for axis in ("x", "y", "z")}
    shards = [
        layout.shard(grid, here | dict(zip(reversed(axes), place, strict=True))) for place in coordinates
    ]
    shapes = [tuple(part.stop - part.start for part in shard) for shard in shards]
    own = local.new_zeros(max(map(math.prod, shapes)))
    own[: local.numel()] = local.reshape(-1)
    for axis in axes:  # the last one becomes the outermost dim
        every = own.new_empty(grid.size(axis), *own.shape)
        grid.collectives.all_gather(every, own, axis, "export").wait()
        own = every
    for shard, shape, values in zip(shards, shapes, own.reshape(len(shards), -1), strict=True):
        yield shard, values[: math.prod(shape)].view(shape)


def write_model(
    model: nn.Module,
    report: Report,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights and the config as `save_pretrained` does. Rank 0 writes, and holds a file of them in memory."""
    is_writer = dist.get_rank() == 0
    arrived: dict[str, Tensor] = {}  # whole tensors of which not all is in a file yet

    def copy(name: str, out: Tensor, index: tuple[slice, ...]) -> None:
        out.copy_(arrived[name][index])

    weights = {}
    for name, ((tensor, layout), *_) in _pieces(model, report, _is_base).items():
        shape = tuple(tensor.shape) if layout is None else layout.hf_shape
        read = functools.partial(copy, name)
        weights[name] = LazyTensor.of(shape, dtype or torch.float32, read, frozenset((name,)))
    stock = stock_model(model)
    if stock is not None:
        weights = in_hub_format(stock, weights)
    split = split_torch_state_dict_into_shards(empty(weights), max_shard_size=file_bytes)
    missing = {file: set(names) for file, names in split.filename_to_tensors.items()}
    files: dict[str, dict[str, Tensor]] = {file: {} for file in missing}
    made_of: dict[str, set[str]] = defaultdict(set)
    for name, lazy in weights.items():
        for source in lazy.sources:
            made_of[source].add(name)
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    for source, tensor in full_parameters(model, report):
        if not is_writer:
            continue
        is_cast = dtype is not None and tensor.is_floating_point()
        arrived[source] = tensor.to("cpu", dtype if is_cast else tensor.dtype)
        for name in [n for n in sorted(made_of[source]) if weights[n].sources <= arrived.keys()]:
            lazy, file = weights[name], split.tensor_to_filename[name]
            written = torch.empty(lazy.shape, dtype=arrived[source].dtype)
            lazy.read_into(written, tuple(slice(0, size) for size in written.shape))
            files[file][name] = written
            missing[file].discard(name)
            if not missing[file]:
                save_file(files.pop(file), folder / file, metadata={"format": "pt"})
            for used in lazy.sources:
                made_of[used].discard(name)
        for done in [name for name in arrived if not made_of[name]]:
            del arrived[done]
    if is_writer:
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / INDEX).write_bytes(dump_json(index))
        _write_configs(model, report, folder, dtype or torch.float32)
    agreements.broadcast_object(None)  # the others go on when all is written


def write_adapter(model: nn.Module, report: Report, folder: Path) -> None:
    """Write the adapters of LoRA as PEFT does, in fp32; rank 0 writes, while all ranks send."""
    if report.lora is None:
        raise ValueError(f"{report.model} has no adapters; call parallelize with lora=Lora(...)")
    found = {
        f"{PEFT_PREFIX}{name}": whole.cpu().contiguous() for name, whole in _whole(model, report, is_adapter)
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
        values = report.lora.to_config(model, report.layouts)
        (folder / ADAPTER_CONFIG).write_bytes(dump_json(values))
    agreements.broadcast_object(None)  # the others go on when all is written


def _write_configs(model: nn.Module, report: Report, folder: Path, dtype: torch.dtype) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return
    values = for_transformers_4(config.to_dict())
    values |= {"architectures": [report.model], "dtype": str(dtype).removeprefix("torch.")}
    values.pop("use_cache", None)  # off for training alone
    (folder / CONFIG).write_bytes(dump_json(values))
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
