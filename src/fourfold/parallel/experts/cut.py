"""Experts on the grid: the inner features of every expert are sharded over y and x together.

    gate_up [E, 2f, h]    this rank's f/(XY) of gate and of up          tokens and hidden features are whole inside
    down    [E, h, f]     this rank's f/(XY)

    forward    gather the hidden features over y          once for experts and router; the router's weight is whole
               gather the tokens over x                   where x ranks have different ones
               the model's own experts, on local weights  a part of a sum over y and x
               reduce-scatter over x, then over y         over y, then all-reduce over x, where x ranks have the same tokens
    backward   the same, the other way round

Every rank has as many rows to compute, whatever the router chooses. The choice itself is the same on all ranks that have a token,
because it is computed from gathered features, which are equal to the bit; sums of logits would differ in their last bits, and near ties
would fall differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fourfold.errors import UnsupportedError
from fourfold.hf.experts import HIDDEN_ATTRIBUTES, ExpertStorage
from fourfold.mesh.axes import Axis
from fourfold.mesh.exchange import gather, scatter
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_backward, sum_forward
from fourfold.parallel.experts.shares import once_in_sum
from fourfold.parallel.experts.whole_features import WholeFeatures

# Attributes of experts that count inner features.
_INNER_ATTRIBUTES = ("intermediate_dim", "intermediate_size", "expert_dim")


def read_whole_features(module: nn.Module, name: str, whole: WholeFeatures, *, is_gate: bool) -> None:
    """Let a router, or a gate of features, read its input with all features."""
    inner, grid = module.forward, whole.grid

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = inner(whole.share(whole.of(hidden, name)), *args, **kwargs)
        if not is_gate:
            return output
        # It is multiplied with this rank's features: each y rank has a part of its gradient.
        return _mapped(output, lambda tensor: _summed(tensor, grid, name, by_tokens=True))

    module.forward = forward


def _mapped(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return function(output) if output.is_floating_point() else output
    return tuple(_mapped(each, function) for each in output)


def _summed(tensor: Tensor, grid: Grid, name: str, *, by_tokens: bool) -> Tensor:
    """The gradient of a tensor of which y ranks, and x ranks with the same tokens, each have a part."""
    if not by_tokens:
        tensor = sum_backward(tensor, grid.collectives, "x", "routing", name)
    return sum_backward(tensor, grid.collectives, "y", "routing", name)


def cut_experts(module: nn.Module, name: str, whole: WholeFeatures, storage: ExpertStorage) -> list[str]:
    """Let the stock experts compute with this rank's inner features; returns a description of each change."""
    inner, grid, by_tokens = module.forward, whole.grid, whole.by_tokens
    collectives = grid.collectives
    # llama4 has the input of each expert, one after the other, and no routing.
    experts = module._parameters["down_proj"].shape[0]  # type: ignore[union-attr]

    def of_all_tokens(tensor: Tensor, rows: int) -> Tensor:
        tensor = routed(tensor, rows, name, whole)
        return gather(tensor, collectives, "x", 0, "routing", name) if by_tokens else tensor

    def forward(hidden: Tensor, *routing: Tensor, **by_name: Tensor) -> Tensor:
        groups = 1 if routing or by_name else experts
        rows = hidden.numel() // hidden.shape[-1]
        gathered = whole.of(hidden, name).view(groups, -1, whole.hidden)
        if by_tokens:
            gathered = gather(gathered, collectives, "x", 1, "activation", name)
        routing = tuple(of_all_tokens(each, rows) for each in routing)
        by_name = {key: of_all_tokens(each, rows) for key, each in by_name.items()}
        parts = inner(gathered.reshape(-1, whole.hidden), *routing, **by_name).view(groups, -1, whole.hidden)
        if by_tokens:
            parts = scatter(parts, collectives, "x", 1, "activation", name)
            return scatter(parts, collectives, "y", 2, "activation", name).view(hidden.shape)
        own = scatter(parts, collectives, "y", 2, "activation", name)
        return sum_forward(own, collectives, "x", "activation", name).view(hidden.shape)

    module.forward = forward
    changed = show_inner_features(module, storage, grid.x * grid.y)
    if hasattr(module, "identity_expert"):
        module.identity_expert = _ShareOfIdentity(grid.x * grid.y)
        changed.append(f"identity experts: 1/{grid.x * grid.y} of their input")
    return changed


def routed(tensor: Tensor, rows: int, name: str, whole: WholeFeatures) -> Tensor:
    """The choices of a rank's tokens, or their weights, of whose gradient ranks have parts."""
    if not isinstance(tensor, Tensor) or tensor.shape[0] != rows:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
        raise UnsupportedError(
            f"{name} got an argument {shape} that has no row for each of its {rows} tokens; use x=1 and y=1"
        )
    if tensor.is_floating_point():
        tensor = _summed(tensor, whole.grid, name, by_tokens=whole.by_tokens)
    return tensor


class _ShareOfIdentity(nn.Module):
    """An expert that returns its input: ranks add up what they return."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden / self.ranks


def show_inner_features(module: nn.Module, storage: ExpertStorage, parts: int) -> list[str]:
    """Set the number of inner features that experts have here, one of ``parts``; returns a description of each change."""
    changed = []
    for attribute in _INNER_ATTRIBUTES:
        value = module.__dict__.get(attribute)
        if parts > 1 and type(value) is int and value == storage.features:
            module.__dict__[attribute] = value // parts
            changed.append(f"{attribute} {value} -> {module.__dict__[attribute]}")
    return changed


def seen_by_experts(
    key: str, storage: ExpertStorage, grid: Grid, axes: Sequence[Axis]
) -> Callable[[Tensor], Tensor]:
    """What the code of experts reads in place of this rank's part of a parameter; ``axes`` shard inner features."""
    if key in storage.halved:
        dim = storage.inner[key]
        return lambda block: block.flatten(dim, dim + 1)
    if key in storage.of_output:
        is_first = not any(grid.coordinate(axis) for axis in axes)
        return lambda block: once_in_sum(block, is_first)
    return _unchanged


def _unchanged(block: Tensor) -> Tensor:
    return block


def show_local_features(module: nn.Module, hidden: int, grid: Grid) -> list[str]:
    """Set the number of hidden features that the module around experts reshapes by; returns a description of each change."""
    changed = []
    for attribute in HIDDEN_ATTRIBUTES:
        value = module.__dict__.get(attribute)
        if grid.y > 1 and type(value) is int and value == hidden:
            module.__dict__[attribute] = value // grid.y
            changed.append(f"{attribute} {value} -> {value // grid.y}")
    return changed
