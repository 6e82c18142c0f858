"""The optimizer of a parallel model's shards, from a section of the run config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fourfold.config.schema import OptimizerSection
from fourfold.optim.muon import ShardedMuon, split_matrices
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.report import Report


def build_optimizer(model: nn.Module, section: OptimizerSection, report: Report) -> torch.optim.Optimizer:
    """Weight decay applies to matrices, not to norms and biases."""
    adamw: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    if section.name == "muon":
        matrices, others = split_matrices(model)
        muon = {"params": matrices, "muon": True, "weight_decay": section.weight_decay}
        groups = [muon, *groups_by_decay(others, section.weight_decay)]
        return ShardedMuon(groups, model, report, momentum=section.momentum, **adamw)
    trained = [p for p in model.parameters() if p.requires_grad]
    # On CUDA the fused one, which reads on the device whether to skip a step (update.py).
    fused = True if report.grid.device.type == "cuda" else None
    return sharded_optimizer(torch.optim.AdamW)(
        groups_by_decay(trained, section.weight_decay), **adamw, fused=fused
    )


def groups_by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    parameters = list(parameters)
    decaying = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
