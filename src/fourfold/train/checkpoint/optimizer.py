"""The state of an optimizer by the names of parameters: its tensors are pieces where the parameter's are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fourfold.train.checkpoint.pieces import Piece

PREFIX = "optimizer."


def capture(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Piece], list[dict[str, Any]]]:
    """The tensors of its state, and the options of its groups."""
    tensors: dict[str, Piece] = {}
    for name, parameter, key in _parameters(optimizer, model):
        place = Piece.of(parameter)
        for kind, value in optimizer.state.get(key, {}).items():
            if value is not None:  # a momentum that has not begun
                tensors[f"{PREFIX}{name}.{kind}"] = _piece(f"{name}: {kind}", value, place)
    return tensors, _groups(optimizer, model)


def restore(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    stored: Mapping[str, TensorStorageMetadata],
    groups: list[dict[str, Any]],
) -> dict[str, Piece]:
    """Set the options, and make room for the tensors that ``stored`` names: the pieces to be filled."""
    _restore_groups(optimizer, model, groups)
    wanted: dict[str, dict[str, TensorStorageMetadata]] = {}
    for full_name, tensor in stored.items():
        if full_name.startswith(PREFIX):
            name, _, kind = full_name.removeprefix(PREFIX).rpartition(".")
            wanted.setdefault(name, {})[kind] = tensor
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    pieces: dict[str, Piece] = {}
    for name, parameter, key in _parameters(optimizer, model):
        place = Piece.of(parameter)
        for kind, tensor in wanted.pop(name, {}).items():
            value = _room(tensor, parameter, key, place, options[id(key)])
            optimizer.state[key][kind] = value
            pieces[f"{PREFIX}{name}.{kind}"] = _piece(f"{name}: {kind}", value, place)
    if wanted:
        raise ValueError(
            f"the checkpoint has the optimizer's state of {len(wanted)} parameters that this optimizer does not have, "
            f"{min(wanted)} among them; give it the parameters that it had"
        )
    return pieces


def _parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Iterable[tuple[str, nn.Parameter, Tensor]]:
    """Name, parameter, and the tensor that the optimizer knows it by: with `on_shards` that is another one."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = [(p, p) for group in optimizer.param_groups for p in group["params"]]
    for parameter, key in getattr(optimizer, "_pairs", own):
        if parameter not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; make the optimizer "
                "after parallelize(model, grid)"
            )
        yield names[parameter], parameter, key


def _piece(what: str, value: Any, place: Piece) -> Piece:
    if isinstance(value, DTensor):
        return Piece.of(value)
    if isinstance(value, Tensor) and value.ndim == 0:
        return Piece.of(value)  # counts the steps, the same on all ranks
    if isinstance(value, Tensor) and value.shape == place.local.shape:
        return place.with_local(value)
    shape = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"{what} of the optimizer is {shape}, neither a number nor a shard of {tuple(place.local.shape)}; use an optimizer "
        "that works on each number for itself"
    )


def _room(
    stored: TensorStorageMetadata, parameter: nn.Parameter, key: Tensor, place: Piece, options: dict[str, Any]
) -> Tensor:
    dtype = stored.properties.dtype
    if tuple(stored.size) == place.whole:
        return torch.zeros_like(key, dtype=dtype, requires_grad=False)
    # As torch.optim itself does: the count stays on the host unless the device is to read it.
    on_device = options.get("capturable") or options.get("fused")
    return torch.zeros(tuple(stored.size), dtype=dtype, device=parameter.device if on_device else "cpu")


# -- groups and their options ------------------------------------------------------------------------------------------


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    names = {id(key): name for name, _, key in _parameters(optimizer, model)}
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        options = {key: _plain(i, key, value) for key, value in group.items() if key != "params"}
        groups.append({"parameters": [names[id(p)] for p in group["params"]], "options": options})
    return groups


def _plain(group: int, key: str, value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    try:
        json.dumps(value)
    except TypeError:
        raise ValueError(
            f"{key!r} of the optimizer's group {group} is a {type(value).__name__}, which JSON cannot hold; use numbers, words "
            "and lists"
        ) from None
    return value


def _restore_groups(optimizer: torch.optim.Optimizer, model: nn.Module, saved: list[dict[str, Any]]) -> None:
    now = _groups(optimizer, model)
    if len(now) != len(saved):
        raise ValueError(f"the optimizer has {len(now)} groups, in the checkpoint it has {len(saved)}; make as many")
    for i, (group, mine, theirs) in enumerate(zip(optimizer.param_groups, now, saved, strict=True)):
        if mine["parameters"] != theirs["parameters"]:
            other = sorted({*mine["parameters"]} ^ {*theirs["parameters"]})
            what = f"{other[0]} is in one of them only" if other else "their order differs"
            raise ValueError(
                f"group {i} of the optimizer has {len(mine['parameters'])} parameters, in the checkpoint "
                f"{len(theirs['parameters'])}: {what}; group the parameters as they were"
            )
        for key, value in theirs["options"].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
