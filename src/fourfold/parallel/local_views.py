"""Local views: stock modules in a parallel model see the shard of a parameter, and the number of heads, of their rank."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import HEAD_ATTRIBUTES, KV_HEAD_ATTRIBUTES, LINEAR_HEAD_ATTRIBUTES
from fourfold.hf.families import Family
from fourfold.mesh.agreements import gather_objects
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_backward, sum_both
from fourfold.parallel.wrap import Inside
from fourfold.weights.api import read_weight

_SAME = 1e-2  # of the largest entry; ranks that have the same values have the same bits, or nearly so
_TENSOR_AXES: tuple[Axis, ...] = ("y", "x")


@dataclass(frozen=True)
class GradientCheck:
    """A hook for the first gradient of an unsharded parameter whose role a user gave, before it is summed over ``axes``.

    A parameter that all ranks use for the same values has the same gradient on all of them. One that ranks use for other heads,
    features or tokens has a part of the gradient on each, and the parts have to be added up. A role that says the one where the
    other is the case would train to other weights without an error.
    """

    name: str
    word: str
    grid: Grid
    axes: tuple[Axis, ...]

    def __call__(self, gradient: Tensor) -> None:
        found = gradient.detach().float().cpu()
        for axis in _TENSOR_AXES:
            if self.grid.size(axis) == 1:
                continue
            group = self.grid.mesh.get_group(axis)
            if dist.get_backend(group) == "fake":  # a dry run has no values
                return
            parts = torch.stack(gather_objects(found, group))
            largest = parts.abs().max()
            is_same = bool((parts - parts[0]).abs().max() <= _SAME * largest)
            if axis in self.axes and is_same and largest > 0:
                self._reject(axis, "is the same on", "and would be summed over them", "replicated")
            if axis not in self.axes and not is_same:
                self._reject(
                    axis, "differs between", "and is not summed over them", "replicated_with_grad_allreduce"
                )
            found = parts.sum(0) if axis in self.axes else found

    def _reject(self, axis: Axis, how: str, then: str, other: str) -> None:
        # On y no role has the other meaning.
        remedy = f"give it the role {other!r}" if axis == "x" and self.word != other else f"use {axis}=1"
        raise UnsupportedError(
            f"{self.name} has the role {self.word!r}, but its gradient {how} the {axis}={self.grid.size(axis)} ranks, {then}; {remedy}"
        )


def show_local_parameters(
    module: nn.Module,
    gradient_axes: Mapping[str, tuple[Axis, ...]],
    inside: Inside,
    checks: Mapping[str, GradientCheck],
    seen_as: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    joined: Mapping[str, int] | None = None,
) -> None:
    """Let the model's own code read plain local tensors where the module's parameters are DTensors.

    ``gradient_axes`` maps the keys of its parameters to the axes over which their gradients are summed, because ranks use
    them for different heads or tokens. ``checks`` see the first gradients of some of them. ``seen_as``: what the code reads in place
    of some of the local tensors. ``joined``: tensors that the code reads as one and that are several parameters here, and their number.
    """
    module.__dict__["_local_view"] = (inside, dict(gradient_axes), dict(checks), dict(seen_as or {}))
    keys, together = tuple(gradient_axes), tuple((joined or {}).items())
    module.__class__ = _with_local_view(type(module), keys, together)  # type: ignore[arg-type]


@functools.cache
def _with_local_view(
    cls: type[nn.Module], keys: tuple[str, ...], joined: tuple[tuple[str, int], ...]
) -> type[nn.Module]:
    """A subclass, shared by all modules of a class: `nn.Module` looks into `_parameters` only if the class lacks the name."""

    def reader(key: str) -> property:
        def read(self: nn.Module) -> Tensor | None:
            inside, gradient_axes, checks, seen_as = self.__dict__["_local_view"]
            if torch.compiler.is_compiling():
                block = read_weight(self, key, gradient_axes[key])
                return seen_as[key](block) if key in seen_as else block
            parameter = self._parameters[key]
            # Outside of forward (FSDP2, the optimizer, a state dict) it is the parameter itself.
            if not inside.depth or not isinstance(parameter, DTensor):
                return parameter
            weight = read_weight(self, key, gradient_axes[key])
            if key in checks and weight.requires_grad:
                weight.register_hook(checks.pop(key))
            return seen_as[key](weight) if key in seen_as else weight

        return property(read)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the block is inside
            return cls.forward(self, *args, **kwargs)
        inside, *_ = self.__dict__["_local_view"]
        with inside:  # also if a user calls the module on its own
            return cls.forward(self, *args, **kwargs)

    def joiner(key: str, parts: int) -> property:
        return property(lambda self: torch.cat([getattr(self, f"{key}_{part}") for part in range(parts)]))

    members = {key: reader(key) for key in keys} | {key: joiner(key, parts) for key, parts in joined}
    return type(cls.__name__, (cls,), {**members, "forward": forward, "__module__": cls.__module__})


def show_local_heads(
    module: nn.Module, family: Family, parts: int, which: int, *, replicated_heads: int, inside: Inside
) -> list[str]:
    """Set an attention module's head counts to part ``which`` of ``parts``; returns a description of each change."""
    changed, counts = [], dict[str, int]()
    buffers = {key: dim for key, dim in family.head_buffers.items() if key in module._buffers}
    names = (*HEAD_ATTRIBUTES, *KV_HEAD_ATTRIBUTES, *LINEAR_HEAD_ATTRIBUTES, *family.inner_attributes)
    for name in names:
        value = module.__dict__.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            counts[name] = max(1, value // parts)
            changed.append(f"{name} {value} -> {counts[name]}")
    if buffers:  # which the model's initialisation computes from the number of all heads
        module.__dict__["_of_this_rank"] = (inside, parts, which, counts)
        module.__class__ = _with_local_buffers(type(module), tuple(buffers.items()), tuple(counts))  # type: ignore[arg-type]
        changed.append(f"buffer {', '.join(buffers)}")
    else:
        module.__dict__.update(counts)
    if replicated_heads and isinstance(module.__dict__.get("num_key_value_groups"), int):
        groups = module.__dict__["num_key_value_groups"]
        # One key/value head remains, and all query heads of this rank attend to it.
        module.__dict__["num_key_value_groups"] = groups * replicated_heads // parts
        changed.append(f"num_key_value_groups {groups} -> {module.__dict__['num_key_value_groups']}")
    if family.heads_from_config and hasattr(module, "config"):
        config = copy.copy(module.config)
        for name in ("num_attention_heads", "num_key_value_heads"):
            setattr(config, name, max(1, getattr(config, name) // parts))
        module.config = config
        changed.append("config's head counts")
    if family.head_arguments:
        module.register_forward_pre_hook(_select_heads(family.head_arguments, parts, which), with_kwargs=True)
        changed.append(f"argument {', '.join(family.head_arguments)}")
    return changed


@functools.cache
def _with_local_buffers(
    cls: type[nn.Module], dims: tuple[tuple[str, int], ...], counts: tuple[str, ...]
) -> type[nn.Module]:
    """A subclass whose forward reads the slices of its heads and their number; outside of it both are whole."""

    def is_inside(module: nn.Module) -> bool:
        return torch.compiler.is_compiling() or bool(module.__dict__["_of_this_rank"][0].depth)

    def buffer_reader(key: str, dim: int) -> property:
        def read(self: nn.Module) -> Tensor | None:
            _, parts, which, _ = self.__dict__["_of_this_rank"]
            buffer = self._buffers[key]
            return (
                cast(Tensor, buffer.chunk(parts, dim)[which])
                if buffer is not None and is_inside(self)
                else buffer
            )

        return property(read)

    def count_reader(key: str) -> property:
        def read(self: nn.Module) -> int:
            return cast(int, (self.__dict__["_of_this_rank"][3] if is_inside(self) else self.__dict__)[key])

        return property(read)

    readers = {key: buffer_reader(key, dim) for key, dim in dims} | {key: count_reader(key) for key in counts}
    return type(cls.__name__, (cls,), {**readers, "__module__": cls.__module__})


@functools.cache
def without_training_path(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose code finds itself in evaluation, in which a module like it computes the same by other kernels."""

    def ignore(self: nn.Module, mode: bool) -> None:
        """`train` sets it."""

    training = property(lambda self: False, ignore)
    return type(cls.__name__, (cls,), {"training": training, "__module__": cls.__module__})


def shard_output(module: nn.Module, grid: Grid) -> None:
    """Shard the unsharded output of a module over y: each rank takes its hidden features."""

    def shard(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Each y rank has the gradient of its own features only; their sum is the complete gradient.
        full = sum_backward(output, grid.collectives, "y", "activation")
        return full.chunk(grid.y, dim=-1)[grid.coordinate("y")]

    module.register_forward_hook(shard)


def shard_arguments(block: nn.Module, names: tuple[str, ...], grid: Grid) -> None:
    """Let a block see this x rank's features of arguments that are complete on each rank; their gradient is complete, too."""
    positions = list(inspect.signature(block.forward).parameters)

    def own(whole: Any) -> Any:
        if not isinstance(whole, Tensor) or grid.x == 1:
            return whole
        whole = sum_backward(whole, grid.collectives, "x", "activation")
        return whole.chunk(grid.x, dim=-1)[grid.coordinate("x")]

    def shard(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        placed = tuple(own(arg) if name in names else arg for name, arg in zip(positions, args, strict=False))
        return placed, {key: own(arg) if key in names else arg for key, arg in kwargs.items()}

    block.register_forward_pre_hook(shard, with_kwargs=True)


def sum_output(module: nn.Module, name: str, grid: Grid) -> None:
    """Add up the outputs of a linear whose input features are sharded over x; each x rank has a part of the sum's gradient."""

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return sum_both(output, grid.collectives, "x", "activation", name)

    module.register_forward_hook(add)


def reject_use(module: nn.Module, name: str, grid: Grid) -> None:
    """Raise if an unsharded part of a multimodal model is used: its features would not match those of the text."""

    def reject(*_: Any) -> None:
        raise UnsupportedError(
            f"{name} is not part of the language model, and its output is not sharded over y={grid.y}, x={grid.x}: "
            "this grid can train on text alone; use x=1 and y=1 for other inputs"
        )

    module.register_forward_pre_hook(reject)


def _select_heads(arguments: Mapping[str, str], parts: int, which: int) -> Any:
    """A hook that selects this rank's heads from per-head arguments (ALiBi slopes)."""

    def select(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).shape[0]
        for name, shape in arguments.items():
            value = kwargs.get(name)
            if not isinstance(value, Tensor):
                continue
            if shape == "batch*heads" and value.ndim == 3:
                by_head = value.view(batch, -1, *value.shape[1:])
                kwargs[name] = by_head.chunk(parts, dim=1)[which].flatten(0, 1)
            elif shape == "heads":
                kwargs[name] = value.chunk(parts, dim=0)[which]
            elif value.ndim > 1 and value.shape[1] > 1:  # [batch, heads, ...]; a size of 1 serves all heads
                kwargs[name] = value.chunk(parts, dim=1)[which]
        return args, kwargs

    return select
