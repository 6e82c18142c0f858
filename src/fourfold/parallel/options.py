"""What `parallelize` can be asked for, and the checks of it that need no grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fourfold.errors import UnsupportedError
from fourfold.parallel.checkpointing import ActivationCheckpointing, weaker
from fourfold.parallel.experts.choice import GATHERED, Experts, check_wanted
from fourfold.parallel.float8.choice import Float8Recipe
from fourfold.parallel.lora import Lora
from fourfold.weights.api import Accumulation, Precision, Weights, backend_of
from fourfold.weights.overlap import Overlap

# How activations are sharded; and what can be asked for: "auto" shards them by tokens too, where the model's code allows it.
Activations = Literal["replicated", "sequence-parallel"]
ActivationsWanted = Literal["auto", "replicated", "sequence-parallel"]


@dataclass(frozen=True)
class Options:
    """See `parallelize`."""

    roles: Mapping[str, str] | None = None
    precision: Precision = "fp32"
    activations: ActivationsWanted = "auto"
    activation_checkpointing: ActivationCheckpointing = "none"
    # How many blocks, from the first one, have it; the others have the next weaker kind. None: all.
    checkpointed_blocks: int | None = None
    weights: Weights = "auto"
    accumulation: Accumulation = "whole"
    overlap: Overlap = field(default_factory=Overlap)
    chunked_loss: bool = True
    compile: bool | None = False  # None: on GPUs, where the model allows it
    # The inputs of recomputed blocks wait for backward in the memory of the host.
    activation_offloading: bool = False
    float8: Float8Recipe = "none"
    lora: Lora | None = None
    experts: Experts = "auto"

    @property
    def checkpointing_words(self) -> str:
        kind, count = self.activation_checkpointing, self.checkpointed_blocks
        if count is None or kind == "none":
            return kind
        return f"{kind} in the first {count} blocks, {weaker(kind)} in the others"

    def __post_init__(self) -> None:
        self._check_experts()
        if self.lora is not None and self.float8 != "none":
            raise UnsupportedError(f"lora with float8={self.float8!r} is not supported; use one of the two")
        for name, values in (
            ("precision", Precision),
            ("activations", ActivationsWanted),
            ("activation_checkpointing", ActivationCheckpointing),
            ("weights", Weights),
            ("accumulation", Accumulation),
            ("float8", Float8Recipe),
        ):
            given, known = getattr(self, name), get_args(values)
            if given not in known:
                *most, last = map(repr, known)
                raise ValueError(f"{name} {given!r} is not supported; use {', '.join(most)} or {last}")

    def _check_experts(self) -> None:
        """Owned experts with what they have not been tested with."""
        check_wanted(self.experts)
        for name, is_on, off in (
            ("compile=True", self.compile, "compile=False"),
            ("lora", self.lora is not None, "lora=None"),
            (f"float8={self.float8!r}", self.float8 != "none", "float8='none'"),
            ("activation_offloading=True", self.activation_offloading, "activation_offloading=False"),
        ):
            if is_on and self.experts not in GATHERED:
                raise UnsupportedError(
                    f"experts={self.experts!r} with {name} is not supported; use {off}, or experts='cut'"
                )


def check_model(model: nn.Module) -> None:
    """Is ``model`` one that can be made parallel: not parallel yet, with fp32 weights?"""
    if isinstance(model, FSDPModule) or backend_of(model) is not None:
        name = type(model).__name__.removeprefix("FSDP")
        raise ValueError(f"{name} is parallel already; build a new one for another grid")
    if hasattr(model, "peft_config"):
        raise UnsupportedError(
            f"{type(model).__name__} has PEFT's adapters; pass the model without them, and lora=Lora.from_peft(folder) or "
            "lora=Lora.of_config(config.to_dict())"
        )
    if getattr(model, "is_quantized", False):
        raise UnsupportedError(
            f"{type(model).__name__} is quantised already; build it without quantization_config, and use lora=Lora(quantization='nf4')"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"{name} is {parameter.dtype}, but master weights are fp32; build the model in fp32 and use "
                "precision='bf16' to compute in bf16"
            )
