"""The optimizer of a run: on a parallel model's shards, its learning rate, and its step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.config.schema import OptimizerSection, ScheduleSection
from fourfold.optim.adamw_bf16 import ADAMW
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
    # On CUDA the fused one, which reads on the device whether to skip a step.
    fused = True if report.grid.device.type == "cuda" else None
    return sharded_optimizer(ADAMW[section.name])(
        groups_by_decay(trained, section.weight_decay), **adamw, fused=fused
    )


def groups_by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    parameters = list(parameters)
    decaying = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate_factor(schedule: ScheduleSection, step: int) -> float:
    """The learning rate of ``step`` (from 0) as a fraction of the highest.

    Warm-up, then cosine, WSD (constant with a decay at the end) or constant. `min_lr_ratio` would be reached after the last
    step, so that no step has a learning rate of 0.

    Example:
        >>> plan = ScheduleSection(steps=100, warmup_steps=10, min_lr_ratio=0.1)
        >>> [round(learning_rate_factor(plan, step), 3) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        left = min(1.0, (schedule.steps - step) / schedule.decay_steps)
    else:
        decay_steps = schedule.steps - schedule.warmup_steps
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - schedule.warmup_steps) / decay_steps)))
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * max(0.0, left)


def update(optimizer: torch.optim.Optimizer, skip_flags: Sequence[Tensor] = ()) -> None:
    """Step, unless one of the flags is set: then weights and optimizer state stay unchanged, on all ranks alike.

    The host does not wait for the flags if the optimizer can read them on the device, as fused AdamW can: the contract of
    `torch.amp.GradScaler` (``found_inf``). With other optimizers the host waits for the device before each step on CUDA.
    """
    if not skip_flags:
        optimizer.step()
        return
    skips = reduce(torch.logical_or, skip_flags)
    if getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        g["fused"] for g in optimizer.param_groups
    ):
        optimizer.found_inf, optimizer.grad_scale = skips.float(), None  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif not bool(skips):
        optimizer.step()
