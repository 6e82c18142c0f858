"""The optimizer's step, or none if a flag says so: then weights and optimizer state stay unchanged, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def update(optimizer: torch.optim.Optimizer, skip_flags: Sequence[Tensor] = ()) -> None:
    """Step, unless one of the flags is set.

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
