"""AdamW whose two moments are in bf16: half the memory of its state.

They are widened to fp32 for the step, a part of the parameters at a time, and rounded to the nearest afterwards. An element's new
value follows from its old one alone, so every grid has the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fourfold.optim.kinds import LARGEST_BETA2, PART

# Weights, gradients, the two moments, and the parameter's state.
_Piece = tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]


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
            beta2 = group["betas"][1]
            if beta2 > LARGEST_BETA2:
                raise ValueError(
                    f"beta2={beta2} changes the second moment by {1 - beta2:.2g} of itself in a step, which bf16 rounds away; use at "
                    f"most {LARGEST_BETA2}, or AdamW with moments in fp32"
                )
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
        found_inf = getattr(self, "found_inf", None)  # set if the step is to be skipped
        for group in self.param_groups:
            for pieces in self._parts(group):
                self._update(pieces, group, found_inf)
            steps = [self.state[p]["step"] for p in group["params"] if p.grad is not None]
            if steps:
                torch._foreach_add_(steps, 1.0 if found_inf is None else 1.0 - found_inf)

    def _parts(self, group: dict[str, Any]) -> Iterator[list[_Piece]]:
        """The pieces of parameters with gradients, about `PART` elements together."""
        pieces: list[_Piece] = []
        elements = 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                on_device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
                for kind in ("exp_avg", "exp_avg_sq"):
                    state[kind] = torch.zeros_like(parameter, dtype=self.moments_dtype)
            whole = (parameter.data, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            if all(tensor.is_contiguous() for tensor in whole):
                flat = [tensor.view(-1).split(PART) for tensor in whole]
            else:
                flat = [(tensor,) for tensor in whole]
            for piece in zip(*flat, strict=True):
                pieces.append((*piece, state))
                elements += piece[0].numel()
                if elements >= PART:
                    yield pieces
                    pieces, elements = [], 0
        if pieces:
            yield pieces

    def _update(self, pieces: list[_Piece], group: dict[str, Any], found_inf: Tensor | None) -> None:
        weights, gradients, first, second, states = (list(column) for column in zip(*pieces, strict=True))
        wide_first = [moment.float() for moment in first]
        wide_second = [moment.float() for moment in second]
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            gradients,
            wide_first,
            wide_second,
            [],
            [
                state["step"].clone() for state in states
            ],  # raised once for all pieces of a parameter, in `step`
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        torch._foreach_copy_(first, wide_first)
        torch._foreach_copy_(second, wide_second)


ADAMW: dict[str, type[torch.optim.AdamW]] = {"adamw": torch.optim.AdamW, "adamw-bf16": AdamWBf16}
