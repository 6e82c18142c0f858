"""Muon on the grid: same results as `torch.optim.Muon` on the Hugging Face matrices, and as AdamW on all other parameters.

    on shards        momentum, as in any element-wise optimizer
    full matrices    Newton-Schulz, each matrix on one rank
    on shards        weight decay and update

A packed projection is one matrix here, as in Hugging Face; the number of parameters it is split into depends on the grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Newton-Schulz, the learning-rate adjustment and their constants have no public names (torch 2.13.0).
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from fourfold.hf.anatomy import find_blocks
from fourfold.hf.experts import is_experts
from fourfold.hf.parameter_layout import ParameterLayout
from fourfold.optim.redistribute import MatrixRedistribute
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.layers import Embedding4D
from fourfold.parallel.report import Report

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
_ShardedAdamW: Any = sharded_optimizer(torch.optim.AdamW)


@dataclass(frozen=True)
class Matrix:
    """A Hugging Face matrix: its shards on this rank, one for each parameter it is split into."""

    layouts: tuple[ParameterLayout, ...]
    shards: tuple[nn.Parameter, ...]

    @property
    def name(self) -> str:
        return self.layouts[0].hf_name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layouts[0].hf_shape)

    @property
    def sharding(self) -> tuple[Any, ...]:
        """Matrices for which this is equal are redistributed together."""
        return tuple((p.hf_shape, p.start, p.shape, tuple(sorted(p.cuts.items()))) for p in self.layouts)


class ShardedMuon(_ShardedAdamW):  # type: ignore[misc]
    """Muon for the parameter groups with ``muon=True``, which hold matrices; AdamW for all others.

    ``adjust_lr_fn`` is that of `torch.optim.Muon`. With ``match_rms_adamw`` updates are as large as AdamW's, so that
    one learning rate and weight decay suit both.

    Example:
        >>> matrices, others = split_matrices(model)
        >>> groups = [{"params": matrices, "muon": True}, {"params": others}]
        >>> optimizer = ShardedMuon(groups, model, report, lr=3e-4)
    """

    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        model: nn.Module,
        report: Report,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str | None = "match_rms_adamw",
        **adamw: Any,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn {adjust_lr_fn!r} is not known; use 'original' or 'match_rms_adamw'"
            )
        muon = {"muon": True, "momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
        super().__init__([muon | g if g.get("muon") else {**g, "muon": False} for g in groups], **adamw)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._grid = report.grid
        self._layout_of = {id(shard): report.layouts[names[parameter]] for parameter, shard in self._pairs}
        self._redistributes: dict[tuple[Any, ...], MatrixRedistribute] = {}
        for group in self.param_groups:
            if group["muon"]:
                _check_full(self._matrices(group["params"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            loss = super().step(closure)  # AdamW; it also sets the gradients of all shards
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_sharding: dict[tuple[Any, ...], list[Matrix]] = {}
        for matrix in self._matrices(p for p in group["params"] if p.grad is not None):
            by_sharding.setdefault(matrix.sharding, []).append(matrix)
        for sharding, matrices in by_sharding.items():
            if sharding not in self._redistributes:
                # Newton-Schulz begins by rounding to bf16, so rounding before sending changes nothing.
                self._redistributes[sharding] = MatrixRedistribute(
                    matrices[0].layouts, self._grid, torch.bfloat16
                )
            redistribute = self._redistributes[sharding]
            for start in range(0, len(matrices), redistribute.ranks):
                self._step_batch(redistribute, matrices[start : start + redistribute.ranks], group)

    def _step_batch(
        self, redistribute: MatrixRedistribute, matrices: list[Matrix], group: dict[str, Any]
    ) -> None:
        directions = [[self._direction(shard, group) for shard in matrix.shards] for matrix in matrices]
        full = redistribute.to_full(directions, matrices[0].name)
        if full is not None:
            full = orthogonalise(full)
        lr, decay = float(group["lr"]), group["weight_decay"]
        rate = _adjust_lr(lr, group["adjust_lr_fn"], matrices[0].shape)
        updates = redistribute.to_shards(full, len(matrices), matrices[0].name)
        for matrix, parts in zip(matrices, updates, strict=True):
            for shard, update in zip(matrix.shards, parts, strict=True):
                shard.mul_(1 - lr * decay)
                shard.add_(update, alpha=-rate)

    def _direction(self, shard: nn.Parameter, group: dict[str, Any]) -> Tensor:
        gradient, state = shard.grad, self.state[shard]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _matrices(self, shards: Iterable[nn.Parameter]) -> list[Matrix]:
        parts: dict[str, list[nn.Parameter]] = {}
        for shard in shards:
            parts.setdefault(self._layout_of[id(shard)].hf_name, []).append(shard)
        return [Matrix(tuple(self._layout_of[id(s)] for s in p), tuple(p)) for p in parts.values()]


def orthogonalise(full: Tensor) -> Tensor:
    """Newton-Schulz as in `torch.optim.Muon`; in place if the direction is in bf16 already."""
    return _zeropower_via_newtonschulz(full, COEFFICIENTS, DEFAULT_NS_STEPS, EPS)


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks except embeddings, for Muon; all other trained parameters); the same on every grid.

    Experts are among the others: their matrices are one tensor of three dims, which `torch.optim.Muon` does not take, and a
    bias of them has two dims and is no matrix.
    """
    inside = {
        parameter
        for block in find_blocks(model)
        for module in block.modules()
        if not isinstance(module, nn.Embedding | Embedding4D) and not is_experts(module)
        for parameter in module._parameters.values()
        if parameter is not None and parameter.ndim == 2
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p in inside]
    if not matrices:
        raise ValueError(
            f"Muon trains the matrices of a model's blocks, but {type(model).__name__} has none that are trained; use AdamW"
        )
    return matrices, [p for p in trained if p not in inside]


def _check_full(matrices: Iterable[Matrix]) -> None:
    for matrix in matrices:
        if len(matrix.shape) != 2:
            raise ValueError(
                f"{matrix.name} has shape {tuple(matrix.shape)}, but Muon takes only matrices; put it into a group of AdamW"
            )
        here = sum(torch.Size(layout.shape).numel() for layout in matrix.layouts)
        if here != matrix.shape.numel():
            raise ValueError(
                f"{matrix.name} is {matrix.shape.numel()} numbers, and this group has parameters for {here} of them; Muon "
                "works on full matrices: give it all parts of a packed projection"
            )
