"""LoRA: which linears have an adapter, its parameters on the grid, and its values in the format of Hugging Face's PEFT.

A linear O = I W^T with an adapter is O = I W^T + s (I A^T) B^T, with A: rank x in, B: out x rank, and W frozen. A is sharded over the
axis that shards the input's features, B over that of the output's. Then each rank's (I A^T) B^T is a part of the same sum as its
I W^T, so no activation is sent for it; the gradient of A is a sum over the output's axis, that of B one over the input's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import is_linear, linear_shape, linears_of_blocks
from fourfold.hf.experts import beside_all_experts, is_experts
from fourfold.hf.init_replay import InitReplay, Step, fill_
from fourfold.hf.parameter_layout import ParameterLayout
from fourfold.hf.safetensors_reader import CheckpointFiles
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.untrusted_input import read_json
from fourfold.weights.api import Precision
from fourfold.weights.quantization import BLOCK, Quantization

A, B = "lora_A", "lora_B"
PEFT_PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# Fields of PEFT's LoraConfig that are read, or that do not change what is computed. Every other one has to be off.
_READ = (
    *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules"),
    *("use_rslora", "bias", "init_lora_weights"),
)
_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
)
# How A and B begin, with values of their own; others also change the weights.
_FIRST_VALUES = (True, False, "gaussian", "orthogonal")


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank, which are trained instead of the weights.

    ``targets``: the ends of the names of linears (``("q_proj", "v_proj")``), a regular expression for whole names, or "all-linear",
    which is all but the head. ``adapter``: a folder that PEFT wrote, or its tensors by name, whose values they begin with; otherwise
    A is random and B is 0. ``dropout``: the share of the numbers that an adapter reads as 0 in training. ``quantization`` of the frozen weights: ``nf4`` stores all linears of blocks, with an adapter or without,
    as 4.5 bits for each number, and is QLoRA; the products are computed on their numbers in the precision of the run.

    Example:
        >>> Lora(rank=8, alpha=16).scale
        2.0
        >>> Lora(targets=("v_proj",)).is_target("model.layers.0.self_attn.v_proj")
        True
    """

    rank: int = 16
    alpha: float = 32
    targets: tuple[str, ...] | str = ALL_LINEAR
    rank_stabilized: bool = False
    dropout: float = 0.0
    quantization: Quantization = "none"
    adapter: Path | Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} of LoRA has to be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} of LoRA has to be at least 0 and below 1")
        if self.quantization not in get_args(Quantization):
            raise ValueError(f"quantization {self.quantization!r} is not supported; use 'none' or 'nf4'")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def is_target(self, name: str) -> bool:
        """Does this linear, which is not the head, have an adapter?"""
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or re.fullmatch(self.targets, name) is not None
        return any(name == target or name.endswith(f".{target}") for target in self.targets)

    @staticmethod
    def from_peft(folder: str | Path) -> Lora:
        """The adapters of a folder that PEFT wrote, with their values."""
        return Lora.of_config(read_json(Path(folder) / CONFIG), Path(folder))

    @staticmethod
    def of_config(config: Mapping[str, Any], adapter: Path | Mapping[str, Tensor] | None = None) -> Lora:
        """What the fields of PEFT's LoraConfig say; other kinds of adapters are an error."""
        kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
        if kind != "LORA":
            raise UnsupportedError(f"adapters of the kind {kind} are not supported; use LORA")
        known = {*_READ, *_WITHOUT_EFFECT}
        wrong = [f"{name}={value!r}" for name, value in config.items() if value and name not in known]
        if config.get("bias") not in ("none", None):
            wrong.append(f"bias={config['bias']!r}")
        first = config.get("init_lora_weights", True)
        if first is not True and (adapter is None or first not in _FIRST_VALUES):
            wrong.append(f"init_lora_weights={first!r}")
        if wrong:
            raise UnsupportedError(f"LoRA with {', '.join(wrong)} is not supported on a grid; leave it out")
        targets = config.get("target_modules")
        if targets is None:
            raise ValueError(f'LoRA without target_modules: name them, or use target_modules="{ALL_LINEAR}"')
        return Lora(
            int(config["r"]),
            float(config["lora_alpha"]),
            targets if isinstance(targets, str) else tuple(sorted(map(str, targets))),
            bool(config.get("use_rslora", False)),
            float(config.get("lora_dropout") or 0.0),
            adapter=adapter,
        )

    def to_config(self, model: nn.Module, layouts: Mapping[str, ParameterLayout]) -> dict[str, Any]:
        """The contents of PEFT's adapter_config.json, for the adapters of a parallel model."""
        names = (layout.hf_name for layout in layouts.values())
        linears = {name.rsplit(".", 2)[0] for name in names if is_adapter(name)}
        transposed = any(getattr(model.get_submodule(name), "transposed", False) for name in linears)
        base = getattr(getattr(model, "config", None), "name_or_path", None) or None
        targets = self.targets
        if targets == ALL_LINEAR:
            targets = tuple(sorted({name.rpartition(".")[2] for name in linears}))
        return {
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": transposed,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": targets if isinstance(targets, str) else list(targets),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": self.rank_stabilized,
        }


def is_adapter(name: str) -> bool:
    """Is this Hugging Face name one of an adapter's parameter?"""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def check_not_experts(model: nn.Module, lora: Lora) -> None:
    """Experts, routers and what gates shared experts get no adapters: that is an error, and not left out."""
    for name, module in model.named_modules():
        is_named = lora.targets != ALL_LINEAR and is_experts(module) and lora.is_target(name)
        if is_named:
            raise UnsupportedError(
                f"{name} are experts, for whose 3D weights adapters are not supported; leave them out of the targets"
            )
    for beside in beside_all_experts(model):
        for name, module in model.get_submodule(beside).named_modules(prefix=beside):
            if is_linear(module) and lora.is_target(name):
                raise UnsupportedError(
                    f"{name} is a linear of a router, or gates a shared expert, for which adapters are not supported; name the other linears "
                    'as targets, such as ("q_proj", "v_proj")'
                )


def freeze(model: nn.Module, precision: Precision, packed: Collection[str] = ()) -> None:
    """The weights are not trained, so they need no fp32 master. Those of the linears ``packed`` stay as they are until they are quantised."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if precision == "bf16" and not (name.endswith(".weight") and name.rpartition(".")[0] in packed):
            parameter.data = parameter.data.to(torch.bfloat16)


def linears_in_nf4(model: nn.Module) -> set[str]:
    """The linears of the blocks, by name: the same on every grid."""
    linears = linears_of_blocks(model)
    for name, module in linears.items():
        in_features, _ = linear_shape(module)
        if isinstance(module, Conv1D):
            raise UnsupportedError(
                f"{name} stores its weight as [in, out], and blocks of NF4 are parts of rows of [out, in]; use quantization='none'"
            )
        if type(module).forward is not nn.Linear.forward:
            raise UnsupportedError(
                f"{name} is a {type(module).__name__}, which computes in its own way, and NF4 is for plain linears; use "
                "quantization='none'"
            )
        if in_features % BLOCK:
            raise UnsupportedError(
                f"{name} has {in_features} input features, which are not whole blocks of {BLOCK} for NF4; use quantization='none'"
            )
    return set(linears)


def check_blocks(name: str, grid: Grid, in_features: int, axis: Axis | None) -> None:
    """Has each rank of the axis that shards the input's features whole blocks of a weight in NF4?"""
    ranks = grid.size(axis)
    if in_features % (ranks * BLOCK):
        raise UnsupportedError(
            f"{name} has {in_features} input features, on {axis}={ranks} {in_features / ranks:g} on each rank, which are not whole blocks of "
            f"{BLOCK} for NF4; use a smaller {axis}, or quantization='none'"
        )


def base_layouts(layouts: Mapping[str, ParameterLayout]) -> dict[str, ParameterLayout]:
    """The layouts of the model's own parameters."""
    return {name: layout for name, layout in layouts.items() if not is_adapter(layout.hf_name)}


@torch.no_grad()
def fill_adapters(
    model: nn.Module, lora: Lora, layouts: Mapping[str, ParameterLayout], grid: Grid, seed: int
) -> None:
    """The first values of adapters: those of a file; or A random as in PEFT, the same on every grid, and B 0."""
    given = lora.adapter
    files = CheckpointFiles(given / WEIGHTS) if isinstance(given, Path) else given
    unused = set() if files is None else _names(files)
    parameters = dict(model.named_parameters())
    for name, layout in layouts.items():
        hf_name = layout.hf_name
        if not is_adapter(hf_name):
            continue
        parameter: Any = parameters[name]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        ((_, index),) = layout.boxes(layout.shard(grid))
        if files is not None:
            stored = PEFT_PREFIX + hf_name
            _check(files, stored, layout.hf_shape)
            if isinstance(files, CheckpointFiles):
                files.read_into(stored, local, index)
            else:
                local.copy_(files[stored][index])
            unused.discard(stored)
        elif hf_name.endswith(f".{B}.weight"):
            local.zero_()
        else:
            bound = 1 / math.sqrt(layout.hf_shape[1])  # kaiming_uniform_ with a = sqrt(5)
            replay = InitReplay(layout.hf_shape, (Step("uniform_", (-bound, bound)),))
            fill_(local, replay, index, name=hf_name, seed=seed)
    if unused:
        raise ValueError(
            f"the adapter has {len(unused)} tensors that the model has no adapter for, such as {min(unused)}; use the model that the "
            "adapter was made for"
        )


def _names(files: CheckpointFiles | Mapping[str, Tensor]) -> set[str]:
    return files.names() if isinstance(files, CheckpointFiles) else set(files)


def _check(files: CheckpointFiles | Mapping[str, Tensor], stored: str, shape: tuple[int, ...]) -> None:
    names = _names(files)
    if stored not in names:
        raise ValueError(
            f"{stored} is not among the {len(names)} tensors of the adapter; use one of this model"
        )
    found = tuple(files.shape(stored) if isinstance(files, CheckpointFiles) else files[stored].shape)
    if found != shape:
        raise ValueError(
            f"{stored} has shape {found} in the adapter, but {shape} in the model; use the adapter_config.json that it was written with"
        )
