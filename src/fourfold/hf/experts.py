"""Mixture of experts in Hugging Face models: how the weights of experts are stored, and what stands beside them.

The experts of a layer are one module with 3D parameters, [experts, out, in]. Most classes have Hugging Face's decorator
`use_experts_implementation`, which says how they store them; three have a forward of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fourfold.errors import UnsupportedError

# Classes without the decorator: are their weights [experts, in, out]?
_UNDECORATED = {"Llama4TextExperts": True, "LongcatFlashExperts": False, "Step3p7Experts": False}
_ROUTER, _GATE = re.compile(r"gate|router"), re.compile(r"shared_expert_gate")
# What a router adds to its scores to choose experts, and not to weight them: a buffer, or a frozen parameter.
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
# Of a module that multiplies its input with random numbers in training.
_JITTER = ("jitter_noise", "input_jitter_noise")
# Of the module around experts: the number of hidden features that it gives its input.
HIDDEN_ATTRIBUTES = ("hidden_dim", "hidden_size", "input_size")


@dataclass(frozen=True)
class ExpertStorage:
    """Which dim of each parameter has the inner features."""

    inner: Mapping[str, int]
    features: int  # inner features of one expert, gate and up counted once
    hidden: int
    # Parameters with all gates first, then all ups.
    halved: frozenset[str] = frozenset()
    # Parameters without inner features: biases of the output.
    of_output: frozenset[str] = frozenset()


def is_experts(module: nn.Module) -> bool:
    """Is it a module that Hugging Face's experts interface knows, or one of those with a forward of their own?"""
    return hasattr(module, "_is_expert_parallel") or type(module).__name__ in _UNDECORATED


def storage_of(module: nn.Module, name: str) -> ExpertStorage:
    """How a module stores its experts; raises `UnsupportedError` where their inner features cannot be sharded."""
    if not is_experts(module):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__} without Hugging Face's use_experts_implementation, so how it stores experts is not "
            "known; use x=1 and y=1"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(
            f"{name} has a norm over each expert's output, whose parts over x and y cannot be normalised apart; use x=1 and y=1"
        )
    transposed = bool(getattr(module, "is_transposed", _UNDECORATED.get(type(module).__name__)))
    out_dim, in_dim = (2, 1) if transposed else (1, 2)
    inner: dict[str, int] = {}
    of_output = set()
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        if key in ("gate_up_proj", "up_proj"):
            inner[key] = out_dim
        elif key == "down_proj":
            inner[key] = in_dim
        elif key in ("gate_up_proj_bias", "up_proj_bias"):
            inner[key] = 1
        elif key == "down_proj_bias":
            of_output.add(key)
        else:
            raise UnsupportedError(
                f"{name}.{key} is a parameter of experts of shape {tuple(parameter.shape)} whose use is not known; use x=1 and y=1"
            )
    down = module._parameters.get("down_proj")
    if down is None:
        raise UnsupportedError(
            f"{name} has no down_proj, so its inner features are not known; use x=1 and y=1"
        )
    halved = {k for k in inner if k.startswith("gate_up") and getattr(module, "is_concatenated", True)}
    return ExpertStorage(
        inner, down.shape[in_dim], down.shape[out_dim], frozenset(halved), frozenset(of_output)
    )


def beside_experts(modules: Mapping[str, nn.Module], experts: str) -> dict[str, str]:
    """The modules beside experts that read whole features: name -> ``router`` or ``gate``."""
    parent = experts.rpartition(".")[0]
    found = {}
    for key, child in modules[parent].named_children():
        name = f"{parent}.{key}" if parent else key
        if name == experts or next(child.parameters(), None) is None:
            continue
        if _GATE.fullmatch(key):
            found[name] = "gate"
        elif _ROUTER.fullmatch(key):
            # The scores of llama4 are multiplied with the experts' input, not with their output.
            is_on_input = type(modules[experts]).__name__ == "Llama4TextExperts"
            found[name] = "gate" if is_on_input else "router"
    return found


def beside_all_experts(model: nn.Module) -> dict[str, str]:
    """The same of all experts of a model that Hugging Face knows."""
    modules = dict(model.named_modules())
    return {
        name: word
        for experts, module in modules.items()
        if is_experts(module)
        for name, word in beside_experts(modules, experts).items()
    }


def correction_bias(modules: Mapping[str, nn.Module], experts: str) -> str | None:
    """The name of the bias by which the router beside ``experts`` chooses; None if it has none."""
    parent = experts.rpartition(".")[0]
    module = modules[parent]
    names = [name for name, _ in (*module.named_buffers(), *module.named_parameters())]
    found = [name for name in names if name.rpartition(".")[2] in _CORRECTIONS]
    if len(found) > 1:
        raise UnsupportedError(
            f"{parent} has several biases of routers, {', '.join(found)}, of which one is expected"
        )
    return f"{parent}.{found[0]}".lstrip(".") if found else None


def check_jitter(name: str, *modules: nn.Module) -> None:
    for module in modules:
        for attribute in _JITTER:
            if value := getattr(module, attribute, 0):
                raise UnsupportedError(
                    f"{name} has {attribute}={value}: it multiplies its input with random numbers, of which ranks would draw others than one "
                    "process; set it to 0, or use x=1 and y=1"
                )
