"""The optimizers behind one seam: given a parallel model and a section of the run's file, an optimizer of its shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fourfold.parallel.optimizer import on_shards
from fourfold.train.config import OptimizerSection


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Matrices decay, norms and biases do not."""
    if section.name == "muon":
        raise ValueError("optimizer.name='muon' is not there yet; use 'adamw'")
    return on_shards(torch.optim.AdamW)(
        groups_by_decay(model, section.weight_decay), lr=section.lr, betas=section.betas, eps=section.eps
    )


def groups_by_decay(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    decaying = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
