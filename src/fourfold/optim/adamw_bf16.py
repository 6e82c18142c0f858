"""AdamW whose two moments are in bf16: half the memory of its state.

They are widened to fp32 for the step, a parameter or a part of one at a time, and rounded to the nearest afterwards. An element's new
value follows from its old one alone, so every grid has the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from fourfold.optim.kinds import PART, check_beta2


class AdamWBf16(torch.optim.AdamW):
    """As `torch.optim.AdamW`; `amsgrad`, `maximize` and `capturable` are not supported."""

    moments_dtype = torch.bfloat16

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, **options)
        for group in self.param_groups:
            check_beta2(group["betas"][1])
            unknown = [
                name for name in ("amsgrad", "maximize", "capturable", "differentiable") if group[name]
            ]
            if unknown:
                raise ValueError(
                    f"{unknown[0]}=True is not supported with moments in bf16; use AdamW with moments in fp32"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("closures are not supported; call backward, then step()")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """One parameter at a time: what a step does for a block does not depend on the blocks before it."""
        state = self.state[parameter]
        if not state:
            on_device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(parameter, dtype=self.moments_dtype)
        assert parameter.grad is not None
        whole = (parameter.data, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        if all(tensor.is_contiguous() for tensor in whole):
            pieces = list(zip(*(tensor.view(-1).split(PART) for tensor in whole), strict=True))
        else:
            pieces = [whole]
        beta1, beta2 = group["betas"]
        before = state["step"].clone()
        for weight, gradient, first, second in pieces:
            state["step"].copy_(before)
            wide_first, wide_second = first.float(), second.float()
            adamw(
                [weight],
                [gradient],
                [wide_first],
                [wide_second],
                [],
                [state["step"]],
                foreach=group["foreach"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),  # set if the step is to be skipped
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            first.copy_(wide_first)
            second.copy_(wide_second)


ADAMW: dict[str, type[torch.optim.AdamW]] = {"adamw": torch.optim.AdamW, "adamw-bf16": AdamWBf16}
