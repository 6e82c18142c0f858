"""The optimizer's step, unless somebody refuses it: then weights and optimizer stay as they are, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def update(optimizer: torch.optim.Optimizer, refusals: Sequence[Tensor] = ()) -> None:
    """Step, if none of the flags is set.

    The host does not wait for the flag where the optimizer can read it on the device, as fused AdamW can: that is the
    contract of `torch.amp.GradScaler` (``found_inf``). Other optimizers cost a wait on CUDA, before each step.
    """
    if not refusals:
        optimizer.step()
        return
    refused = reduce(torch.logical_or, refusals)
    if getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        g["fused"] for g in optimizer.param_groups
    ):
        optimizer.found_inf, optimizer.grad_scale = refused.float(), None  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif not bool(refused):
        optimizer.step()
