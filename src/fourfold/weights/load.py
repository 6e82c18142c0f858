"""Fill shards: by the model's own random init, or from a checkpoint; an unsharded tensor is never created."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.hf.hub_format import ModelFiles
from fourfold.hf.init_replay import InitReplay, fill_
from fourfold.hf.parameter_layout import ParameterLayout
from fourfold.mesh.grid import Grid
from fourfold.weights.nf4 import is_packed, numbers, quantize


def _shards(model: nn.Module, layouts: Mapping[str, ParameterLayout]) -> list[tuple[ParameterLayout, Tensor]]:
    parameters = dict(model.named_parameters())
    shards = []
    for name, layout in layouts.items():
        parameter = parameters[name]
        assert isinstance(parameter, DTensor)
        shards.append((layout, parameter.to_local()))
    return shards


@contextmanager
def _numbers_of(local: Tensor) -> Iterator[Tensor]:
    """A shard to write to; for a packed one memory of its size in fp32, which is packed afterwards."""
    if not is_packed(local):
        yield local
        return
    values = torch.empty(numbers(local), dtype=torch.float32, device=local.device)
    yield values
    local.copy_(quantize(values))


@torch.no_grad()
def init_shards(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    replays: Mapping[str, InitReplay],
    grid: Grid,
    seed: int,
) -> None:
    """Random init with values that are the same on every grid."""
    for layout, local in _shards(model, layouts):
        with _numbers_of(local) as values:
            for part, index in layout.boxes(layout.shard(grid)):
                fill_(values[part], replays[layout.hf_name], index, name=layout.hf_name, seed=seed)


@torch.no_grad()
def load_shards(
    model: nn.Module, layouts: Mapping[str, ParameterLayout], files: ModelFiles, grid: Grid
) -> set[str]:
    """Read this rank's shards from a Hugging Face checkpoint, only the bytes it needs; returns the names of unused tensors."""
    unused = files.names()
    names = files.names()
    for layout, local in _shards(model, layouts):
        stored = layout.hf_name
        if stored not in names:
            near = difflib.get_close_matches(stored, sorted(names), n=1, cutoff=0.0)
            raise ValueError(
                f"{stored} is not among the {len(names)} tensors of the checkpoint {files.path}"
                + (f" (the nearest is {near[0]})" if near else "")
                + f"; use a checkpoint of {type(model).__name__.removeprefix('FSDP')}, or the model and config.json of "
                "that checkpoint"
            )
        if files.shape(stored) != layout.hf_shape:
            raise ValueError(
                f"{stored} has shape {files.shape(stored)} in {files.path}, but {layout.hf_shape} in the model; "
                "use the config.json of that checkpoint"
            )
        with _numbers_of(local) as values:
            for part, index in layout.boxes(layout.shard(grid)):
                files.read_into(stored, values[part], index)
        unused.discard(stored)
    # Persistent buffers are small and complete on each rank.
    for name, buffer in model.named_buffers():
        if name in names:
            files.read_into(name, buffer, tuple(slice(0, size) for size in buffer.shape))
            unused.discard(name)
    return unused
