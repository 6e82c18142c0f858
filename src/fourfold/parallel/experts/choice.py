"""Which experts ranks own, as `parallelize` is asked to: those of all layers, over z, over x or over both, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import idle_towers
from fourfold.hf.experts import is_experts
from fourfold.mesh.axes import Z_AND_X, Axis, divisors
from fourfold.mesh.grid import Grid

# Gathered over z and cut over y and x; or owned by the ranks of these axes. "auto" is the first, unless a plan chose the second.
Experts = Literal["auto", "cut"] | tuple[Axis, ...]
GATHERED: tuple[Literal["auto", "cut"], ...] = ("auto", "cut")
OWNED: tuple[tuple[Axis, ...], ...] = (("z",), ("x",), ("z", "x"))


@dataclass(frozen=True)
class OwnedExperts:
    """The modules by name, and what the report says of them."""

    names: frozenset[str] = frozenset()
    note: str | None = None
    axis: Axis = "z"  # whose ranks own them; "zx" is z and x together

    @property
    def over_x(self) -> bool:
        """Do x ranks have whole experts, and not parts of their inner features?"""
        return bool(self.names) and self.axis != "z"

    @property
    def over_z(self) -> bool:
        """Are their weights not gathered over z?"""
        return bool(self.names) and self.axis != "x"


def check_wanted(experts: Any) -> None:
    """Is it one of the values that `parallelize` takes?"""
    if experts in GATHERED:
        return
    if not isinstance(experts, tuple) or not experts or not set(experts) <= set(get_args(Axis)):
        raise ValueError(
            f"experts {experts!r} is not supported; use 'auto', 'cut', ('z',), ('x',) or ('z', 'x')"
        )
    if experts not in OWNED:
        raise UnsupportedError(
            f"experts={experts!r}: ranks can own experts over z, over x, or over both; use ('z',), ('x',) or ('z', 'x'), or 'cut', which shards "
            "their inner features over y and x"
        )


def choose_owned(model: nn.Module, grid: Grid, experts: Experts) -> OwnedExperts:
    """The experts that ranks own; raises `UnsupportedError` where they cannot."""
    towers = idle_towers(model) if grid.x * grid.y > 1 else []  # on z alone they may run
    found = {
        name: module
        for name, module in model.named_modules()
        if is_experts(module) and not any(name.startswith(f"{tower}.") for tower in towers)
    }
    if not isinstance(experts, tuple):
        if not found or grid.z == 1:
            return OwnedExperts()
        why = "asked for" if experts == "cut" else "auto, without a plan"
        return OwnedExperts(note=f"experts: gathered over z={grid.z} ({why})")
    if not found:
        raise ValueError(
            f"experts={experts!r}, but {type(model).__name__} has no experts that are known; leave it out"
        )
    over = [axis for axis in experts if grid.size(axis) > 1]
    sizes = " and ".join(f"{axis}={grid.size(axis)}" for axis in experts)
    if not over:
        return OwnedExperts(note=f"experts={experts!r} has no effect with {sizes}; leave it out")
    ranks = math.prod(grid.size(axis) for axis in over)
    for name, module in found.items():
        _check_module(module, name, grid, over, ranks)
    _check_untied(model, found)
    counts = sorted({module.__dict__["num_experts"] for module in found.values()})
    each = ", ".join(f"{count // ranks} of {count}" for count in counts)
    return OwnedExperts(
        frozenset(found),
        f"experts: owned over {sizes}, {each} on each rank; the rows of tokens are sent to them",
        over[0] if len(over) == 1 else Z_AND_X,
    )


def _check_module(module: nn.Module, name: str, grid: Grid, over: Sequence[Axis], ranks: int) -> None:
    sizes = "*".join(over) + f"={ranks}"
    if not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__} with a forward of its own, not one of Hugging Face's experts interface, so {sizes} ranks "
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
    if experts % ranks:
        last = over[0]  # of two the other one stays
        others = ranks // grid.size(last)
        fits = max((n for n in divisors(grid.size(last)) if experts % (n * others) == 0), default=None)
        way_out = (
            "" if fits is None else f"use {last}={fits} with data={grid.data * grid.size(last) // fits}, or "
        )
        raise UnsupportedError(
            f"{sizes} does not divide the {experts} experts of {name}, so ranks cannot own whole experts; {way_out or 'use '}experts='cut'"
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
