"""Optimizer state by the names of Hugging Face tensors, sharded like the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fourfold.checkpoint.local_shards import LocalShard, LocalShards
from fourfold.hf.parameter_layout import ParameterLayout

PREFIX = "optimizer."
# How a step is computed on this device is up to the run, not to the checkpoint.
IMPLEMENTATION_OPTIONS = ("fused", "foreach", "capturable")
# Layout, parameter, and the key of its state: with `sharded_optimizer` that is another tensor.
Parameter = tuple[ParameterLayout, nn.Parameter, Tensor]


def capture(
    optimizer: torch.optim.Optimizer, model: nn.Module, layouts: Mapping[str, ParameterLayout]
) -> tuple[dict[str, LocalShards], list[dict[str, Any]]]:
    """The tensors of the optimizer's state, and the options of its groups."""
    tensors: dict[str, LocalShards] = {}
    parameters = _parameters(optimizer, model, layouts)
    for layout, parameter, key in parameters:
        for kind, value in optimizer.state.get(key, {}).items():
            if value is not None:  # a momentum that has not started
                name = f"{PREFIX}{layout.hf_name}.{kind}"
                tensors.setdefault(name, LocalShards()).add(*_local_shards(name, value, parameter, layout))
    return tensors, _groups(optimizer, parameters)


def restore(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    stored: Mapping[str, TensorStorageMetadata],
    groups: list[dict[str, Any]],
) -> dict[str, LocalShards]:
    """Set the options, and allocate and return the tensors that ``stored`` names, to be filled."""
    parameters = _parameters(optimizer, model, layouts)
    _restore_groups(optimizer, _groups(optimizer, parameters), groups)
    wanted: dict[str, dict[str, TensorStorageMetadata]] = {}
    for full_name, tensor in stored.items():
        if full_name.startswith(PREFIX):
            name, _, kind = full_name.removeprefix(PREFIX).rpartition(".")
            wanted.setdefault(name, {})[kind] = tensor
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    tensors: dict[str, LocalShards] = {}
    known = set()
    for layout, parameter, key in parameters:
        known.add(layout.hf_name)
        for kind, tensor in wanted.get(layout.hf_name, {}).items():
            name = f"{PREFIX}{layout.hf_name}.{kind}"
            moments = getattr(optimizer, "moments_dtype", key.dtype)
            value = _allocate(tensor, parameter, key, layout, options[id(key)], moments)
            optimizer.state[key][kind] = value
            tensors.setdefault(name, LocalShards()).add(*_local_shards(name, value, parameter, layout))
    if unknown := set(wanted) - known:
        raise ValueError(
            f"the checkpoint has the optimizer's state of {len(unknown)} tensors that this optimizer does not have, "
            f"{min(unknown)} among them; give it the same parameters as at the save"
        )
    return tensors


def _parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module, layouts: Mapping[str, ParameterLayout]
) -> list[Parameter]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = [(p, p) for group in optimizer.param_groups for p in group["params"]]
    found = []
    for parameter, key in getattr(optimizer, "_pairs", own):
        if parameter not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model; make the optimizer "
                "after parallelize(model, grid)"
            )
        found.append((layouts[names[parameter]], parameter, key))
    return found


def _local_shards(
    name: str, value: Any, parameter: nn.Parameter, layout: ParameterLayout
) -> list[LocalShard]:
    if isinstance(value, DTensor):
        return LocalShard.of(value, layout)
    if isinstance(value, Tensor) and value.ndim == 0:
        return LocalShard.of(value)  # the step count, the same on all ranks
    own = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    if isinstance(value, Tensor) and value.shape == own:
        return LocalShard.of(parameter, layout, value)
    shape = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"{name} is {shape}, neither a scalar nor a shard of {tuple(own)}; use an element-wise optimizer"
    )


def _allocate(
    stored: TensorStorageMetadata,
    parameter: nn.Parameter,
    key: Tensor,
    layout: ParameterLayout,
    options: dict[str, Any],
    moments: torch.dtype,
) -> Tensor:
    if tuple(stored.size) == layout.hf_shape:
        return torch.zeros_like(key, dtype=moments, requires_grad=False)
    # As in torch.optim: the step count stays on the host unless the device reads it.
    on_device = options.get("capturable") or options.get("fused")
    device = parameter.device if on_device else "cpu"
    return torch.zeros(tuple(stored.size), dtype=stored.properties.dtype, device=device)


# -- groups and their options ------------------------------------------------------------------------------------------


def _groups(optimizer: torch.optim.Optimizer, parameters: list[Parameter]) -> list[dict[str, Any]]:
    names = {id(key): layout.hf_name for layout, _, key in parameters}
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        options = {key: _plain(i, key, value) for key, value in group.items() if key != "params"}
        groups.append({"parameters": sorted({names[id(p)] for p in group["params"]}), "options": options})
    return groups


def _plain(group: int, key: str, value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    try:
        json.dumps(value)
    except TypeError:
        raise ValueError(
            f"{key!r} of the optimizer's group {group} is a {type(value).__name__}, which JSON cannot hold; use numbers, strings "
            "and lists"
        ) from None
    return value


def _restore_groups(
    optimizer: torch.optim.Optimizer, now: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> None:
    if len(now) != len(saved):
        raise ValueError(
            f"the optimizer has {len(now)} groups, in the checkpoint it has {len(saved)}; use the same number"
        )
    for i, (group, mine, theirs) in enumerate(zip(optimizer.param_groups, now, saved, strict=True)):
        if mine["parameters"] != theirs["parameters"]:
            other = min({*mine["parameters"]} ^ {*theirs["parameters"]})
            raise ValueError(
                f"group {i} of the optimizer has {len(mine['parameters'])} tensors, in the checkpoint "
                f"{len(theirs['parameters'])}: {other} is in one of them only; use the same groups as at the save"
            )
        for key, value in theirs["options"].items():
            if key in IMPLEMENTATION_OPTIONS:
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
