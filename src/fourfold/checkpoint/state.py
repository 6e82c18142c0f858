"""The contents of a checkpoint: all state that determines how a run continues, independent of the grid."""

from __future__ import annotations

import difflib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fourfold.checkpoint import optimizer as optimizers
from fourfold.checkpoint.folder import Folder
from fourfold.checkpoint.local_shards import LocalShard, LocalShards
from fourfold.checkpoint.manifest import CorruptCheckpointError, read_json
from fourfold.parallel.dropout import seed_ranks
from fourfold.parallel.lora import is_adapter
from fourfold.parallel.report import Report
from fourfold.untrusted_input import natural, word

MODEL = "model."
VALUES = "state.json"  # everything except tensors


@dataclass
class TrainState:
    """The state of a run that is saved; `Checkpoints.load` sets ``step``, ``seed`` and ``data`` from the checkpoint.

    ``schedule`` is any object with `state_dict` and `load_state_dict` of plain values, like torch's schedulers. ``data``
    holds global counters, so that any grid can resume from them. Random state is not saved but follows from ``seed``
    and ``step``: call `seed_ranks(grid, seed, step)` before each step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    report: Report
    schedule: Any = None
    step: int = 0
    seed: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    # Other state that determines how the run continues, the same on all ranks.
    beside: dict[str, Any] = field(default_factory=dict)
    # The grid of the checkpoint that was loaded, if any.
    saved_on: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Snapshot:
    """This rank's tensors by name, and the values that are the same on all ranks."""

    tensors: dict[str, LocalShards]
    values: dict[str, Any]

    def staged(self) -> Snapshot:
        """Copies in host memory, complete when this returns."""
        copies = Snapshot({name: held.staged() for name, held in self.tensors.items()}, self.values)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return copies


def capture(training: TrainState) -> Snapshot:
    """The current state to save; the tensors are not copied."""
    tensors = model_tensors(training.model, training.report)
    states, groups = optimizers.capture(training.optimizer, training.model, training.report.layouts)
    report = training.report
    config: Any = getattr(training.model, "config", None)
    values = {
        "step": training.step,
        "seed": training.seed,
        "data": training.data,
        "config": training.config,
        "beside": training.beside,
        "schedule": training.schedule.state_dict() if training.schedule is not None else None,
        "optimizer": groups,
        "model": _model_config(config, report) if hasattr(config, "to_json_string") else None,
        "adapter": report.lora.to_config(training.model, report.layouts) if report.lora is not None else None,
        "grid": report.grid.shape,
        "versions": versions(),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for key, value in values.items():
        try:
            values[key] = json.loads(json.dumps(value))  # also a copy, because training continues
        except TypeError as error:
            raise ValueError(
                f"{key} cannot be saved as JSON ({error}); use numbers, strings, lists and dicts"
            ) from error
    return Snapshot(tensors | states, values)


def targets(
    training: TrainState, stored: Mapping[str, TensorStorageMetadata], values: dict[str, Any]
) -> dict[str, LocalShards]:
    """The run's tensors, to be filled with the ``stored`` ones; a checkpoint of another model is an error."""
    tensors = model_tensors(training.model, training.report)
    _check_model(tensors, stored)
    return tensors | optimizers.restore(
        training.optimizer, training.model, training.report.layouts, stored, values["optimizer"]
    )


def read_values(folder: Folder) -> dict[str, Any]:
    """All that is no tensor; `CorruptCheckpointError` if it is not what `capture` writes."""
    values = read_json(folder, VALUES)
    try:
        natural(values["step"]), natural(values["seed"])
        for key in ("data", "config", "versions"):
            if not isinstance(values[key], dict):
                raise ValueError(f"{key} is not an object")
        if not isinstance(values.get("beside", {}), dict):
            raise ValueError("beside is not an object")
        if not isinstance(values.get("adapter"), dict | None):
            raise ValueError("adapter is not an object")
        if not isinstance(values["schedule"], dict | None):
            raise ValueError("schedule is not an object")
        word(values["saved_at"])
        if len([natural(size) for size in values["grid"]]) != 4:
            raise ValueError("the grid does not have 4 axes")
        for group in values["optimizer"]:
            names = [word(name) for name in group["parameters"]]
            if "params" in group["options"] or not isinstance(group["options"], dict):
                raise ValueError(f"the options of {names[:1]} are not the options of an optimizer")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"{folder}/{VALUES}: is not valid ({error!r:.200})") from error
    return values


def resume(training: TrainState, values: dict[str, Any]) -> None:
    """Set everything except tensors."""
    if (training.schedule is None) != (values["schedule"] is None):
        has = (
            "a schedule, but the run has none"
            if training.schedule is None
            else "no schedule, but the run has one"
        )
        raise ValueError(f"the checkpoint has {has}; use the same settings as at the save")
    if training.schedule is not None:
        training.schedule.load_state_dict(values["schedule"])
    training.step, training.seed, training.data = values["step"], values["seed"], values["data"]
    training.beside = values.get("beside", {})
    training.saved_on = tuple(values["grid"])
    seed_ranks(training.report.grid, training.seed, training.step)


def model_tensors(model: nn.Module, report: Report) -> dict[str, LocalShards]:
    """Parameters, tied ones once, and persistent buffers, by their names in the Hugging Face model.

    Of a model with LoRA the adapters alone, because the rest does not change.
    """
    # FSDP2 may hold unsharded weights after an evaluation; its state dict hooks reshard them.
    state = model.state_dict()
    tensors: dict[str, LocalShards] = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        if name in state and state[name].numel():
            layout = report.layouts.get(name)
            hf_name = name if layout is None else layout.hf_name
            if is_adapter(hf_name) != (report.lora is not None):
                continue
            tensors.setdefault(f"{MODEL}{hf_name}", LocalShards()).add(*LocalShard.of(state[name], layout))
    return tensors


def _model_config(config: Any, report: Report) -> dict[str, Any]:
    """The contents of config.json, with the model's class, which a model made from a configuration lacks there."""
    return {**json.loads(config.to_json_string()), "architectures": [report.model]}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("fourfold", "torch", "transformers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # not installed as a package
            found[package] = "unknown"
    return found


def _check_model(tensors: Mapping[str, LocalShards], stored: Mapping[str, TensorStorageMetadata]) -> None:
    there = {name for name in stored if name.startswith(MODEL)}
    for name, held in tensors.items():
        if name not in there:
            near = difflib.get_close_matches(name, sorted(there), n=1, cutoff=0.0)
            raise ValueError(
                f"{name} is not among the {len(there)} tensors of the checkpoint's model"
                + (f" (the nearest is {near[0]})" if near else "")
                + "; use the model's configuration that it was saved with"
            )
        if tuple(stored[name].size) != held.global_shape:
            raise ValueError(
                f"{name} has shape {tuple(stored[name].size)} in the checkpoint, but {held.global_shape} in the model; use the "
                "configuration that it was saved with"
            )
    if more := there - set(tensors):
        raise ValueError(
            f"the checkpoint has {len(more)} tensors that the model does not have, {min(more)} among them; use the model's "
            "configuration that it was saved with"
        )
