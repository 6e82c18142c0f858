"""Which experts ranks own, as `parallelize` is asked to: those of all layers over z, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import idle_towers
from fourfold.hf.experts import is_experts
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid

# Gathered over z and cut over y and x; or owned by the ranks of these axes. "auto" is the first, until the planner knows the second.
Experts = Literal["auto", "cut"] | tuple[Axis, ...]
GATHERED: tuple[Literal["auto", "cut"], ...] = ("auto", "cut")


@dataclass(frozen=True)
class OwnedExperts:
    """The modules by name, and what the report says of them."""

    names: frozenset[str] = frozenset()
    note: str | None = None


def check_wanted(experts: Any) -> None:
    """Is it one of the values that `parallelize` takes?"""
    if experts in GATHERED:
        return
    if not isinstance(experts, tuple) or not experts or not set(experts) <= set(get_args(Axis)):
        raise ValueError(f"experts {experts!r} is not supported; use 'auto', 'cut' or ('z',)")
    if experts != ("z",):
        raise UnsupportedError(
            f"experts={experts!r}: ranks can own experts over z alone; use ('z',), or 'cut', which shards their inner features over y and x"
        )


def choose_owned(model: nn.Module, grid: Grid, experts: Experts) -> OwnedExperts:
    """The experts that ranks own; raises `UnsupportedError` where they cannot."""
    towers = idle_towers(model) if grid.x * grid.y > 1 else []  # on z alone they may run
    found = {
        name: module
        for name, module in model.named_modules()
        if is_experts(module) and not any(name.startswith(f"{tower}.") for tower in towers)
    }
    if experts in GATHERED:
        if not found or grid.z == 1:
            return OwnedExperts()
        why = "asked for" if experts == "cut" else "auto: the planner does not know owned ones"
        return OwnedExperts(note=f"experts: gathered over z={grid.z} ({why})")
    if not found:
        raise ValueError(
            f"experts={experts!r}, but {type(model).__name__} has no experts that are known; leave it out"
        )
    if grid.z == 1:
        return OwnedExperts(note=f"experts={experts!r} has no effect with z=1; leave it out")
    for name, module in found.items():
        _check_module(module, name, grid)
    _check_untied(model, found)
    counts = sorted({module.__dict__["num_experts"] for module in found.values()})
    each = ", ".join(f"{count // grid.z} of {count}" for count in counts)
    return OwnedExperts(
        frozenset(found),
        f"experts: owned over z={grid.z}, {each} on each rank; the rows of tokens are sent to them",
    )


def _check_module(module: nn.Module, name: str, grid: Grid) -> None:
    if not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__} with a forward of its own, not one of Hugging Face's experts interface, so z={grid.z} ranks "
            "cannot own its experts; use experts='cut'"
        )
    experts = module.__dict__.get("num_experts")
    stored = {
        key: parameter.shape[0] for key, parameter in module._parameters.items() if parameter is not None
    }
    if type(experts) is not int or set(stored.values()) != {experts}:
        raise UnsupportedError(
            f"{name} has num_experts={experts} and parameters of {stored} experts, so which rows are whose is not known; use experts='cut'"
        )
    if experts % grid.z:
        fits = max(z for z in range(1, grid.z + 1) if experts % z == 0 == grid.z % z)
        raise UnsupportedError(
            f"z={grid.z} does not divide the {experts} experts of {name}, so ranks cannot own whole experts; use z={fits} with "
            f"data={grid.data * grid.z // fits}, or experts='cut'"
        )


def _check_untied(model: nn.Module, owners: Mapping[str, nn.Module]) -> None:
    """A weight of two modules, as an encoder and a decoder may have, is one that has not been tried."""
    first: dict[nn.Parameter, str] = {}
    owned = {p for module in owners.values() for p in module._parameters.values()}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter not in owned:
                continue
            if first.setdefault(parameter, f"{name}.{key}") != f"{name}.{key}":
                raise UnsupportedError(
                    f"{name}.{key} is tied to {first[parameter]}, and ranks cannot own experts of two modules; untie them, or use "
                    "experts='cut'"
                )
