"""Muon on the grid: the numbers of `torch.optim.Muon` on the Hugging Face matrices, and of AdamW on all the rest.

    on shards         momentum, as any element-wise optimizer
    whole matrices    Newton-Schulz, each matrix on one rank
    on shards         decay and update

A packed projection is one matrix here, as it is in Hugging Face: into how many parameters it is cut depends on the grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Newton-Schulz, the factor of the rate, and their constants: torch has no public names for them (torch 2.13.0).
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from fourfold.hf.parameter_layout import ParameterLayout
from fourfold.optim.redistribute import MatrixRedistribute
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.embedding import Embedding4D
from fourfold.parallel.parallelize import find_blocks
from fourfold.parallel.report import Report

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
_AdamWOnShards: Any = sharded_optimizer(torch.optim.AdamW)


@dataclass(frozen=True)
class Matrix:
    """A Hugging Face matrix: its shards on this rank, one of each parameter that it is cut into."""

    layouts: tuple[ParameterLayout, ...]
    shards: tuple[nn.Parameter, ...]

    @property
    def name(self) -> str:
        return self.layouts[0].hf_name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layouts[0].hf_shape)

    @property
    def cut(self) -> tuple[Any, ...]:
        """Matrices for which this is equal are dealt together."""
        return tuple((p.hf_shape, p.start, p.shape, tuple(sorted(p.cuts.items()))) for p in self.layouts)


class MuonOnShards(_AdamWOnShards):  # type: ignore[misc]
    """One optimizer: groups with ``muon=True`` are of matrices, all others are AdamW's.

    ``adjust_lr_fn`` is that of `torch.optim.Muon`. With ``match_rms_adamw`` updates are as large as AdamW's, so that
    its rate and decay fit both.

    Example:
        >>> matrices, others = split_matrices(model)
        >>> groups = [{"params": matrices, "muon": True}, {"params": others}]
        >>> optimizer = MuonOnShards(groups, model, report, lr=3e-4)
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
        self._deals: dict[tuple[Any, ...], MatrixRedistribute] = {}
        for group in self.param_groups:
            if group["muon"]:
                _check_whole(self._matrices(group["params"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            super().step(closure)  # AdamW's; it also shows all shards their gradients of this step
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[tuple[Any, ...], list[Matrix]] = {}
        for matrix in self._matrices(p for p in group["params"] if p.grad is not None):
            alike.setdefault(matrix.cut, []).append(matrix)
        for cut, matrices in alike.items():
            if cut not in self._deals:
                # Newton-Schulz begins with rounding to bf16: what is sent may be rounded before.
                self._deals[cut] = MatrixRedistribute(matrices[0].layouts, self._grid, torch.bfloat16)
            deal = self._deals[cut]
            for start in range(0, len(matrices), deal.ranks):
                self._step_deal(deal, matrices[start : start + deal.ranks], group)

    def _step_deal(self, deal: MatrixRedistribute, matrices: list[Matrix], group: dict[str, Any]) -> None:
        directions = [[self._direction(shard, group) for shard in matrix.shards] for matrix in matrices]
        whole = deal.to_whole(directions, matrices[0].name)
        if whole is not None:
            whole = orthogonalise(whole)
        lr, decay = float(group["lr"]), group["weight_decay"]
        rate = _adjust_lr(lr, group["adjust_lr_fn"], matrices[0].shape)
        updates = deal.to_shards(whole, len(matrices), matrices[0].name)
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


def orthogonalise(whole: Tensor) -> Tensor:
    """What `torch.optim.Muon` makes of a direction; in place where that is in bf16 already."""
    return _zeropower_via_newtonschulz(whole, COEFFICIENTS, DEFAULT_NS_STEPS, EPS)


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What Muon is for, the matrices of the blocks but embeddings, and all the rest; the same on every grid."""
    inside = {
        parameter
        for block in find_blocks(model)
        for module in block.modules()
        if not isinstance(module, nn.Embedding | Embedding4D)
        for parameter in module._parameters.values()
        if parameter is not None and parameter.ndim == 2
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p in inside]
    if not matrices:
        raise ValueError(
            f"Muon is for the matrices of a model's blocks, and {type(model).__name__} has none that are trained; use AdamW"
        )
    return matrices, [p for p in trained if p not in inside]


def _check_whole(matrices: Iterable[Matrix]) -> None:
    for matrix in matrices:
        if len(matrix.shape) != 2:
            raise ValueError(
                f"{matrix.name} has shape {tuple(matrix.shape)}, and Muon takes matrices alone; leave it to AdamW's groups"
            )
        here = sum(torch.Size(layout.shape).numel() for layout in matrix.layouts)
        if here != matrix.shape.numel():
            raise ValueError(
                f"{matrix.name} is {matrix.shape.numel()} numbers, and this group has parameters for {here} of them; Muon "
                "works on whole matrices: give it all parts of a packed projection"
            )
