"""The formula that a norm follows.

It is not guessed from the norm's name: `recognise` runs the module's own forward on a few random values and compares the
result, in fp32 and in bf16, with each formula here. A norm that matches none is unsupported.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.hf.anatomy import first_attribute

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps")
# Tried where a module does not state its own; the last is that of torch.nn.RMSNorm.
_USUAL_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class Formula:
    """Gain x (input - mean) / sqrt(variance + epsilon) + bias, in one of its common variants."""

    centred: bool  # LayerNorm subtracts the mean, RMSNorm does not
    unit_offset: bool  # Gemma and Nemotron store gain - 1
    gain_in_fp32: bool  # multiply by the gain before casting back to the input's dtype
    epsilon: float

    def apply(
        self,
        x: Tensor,
        features: int,
        weight: Tensor | None,
        bias: Tensor | None,
        total: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """``total`` reduces a sum over this rank's features to the sum over all features."""
        wide = x.float()
        if self.centred:
            # The mean first, then the squares about it: one pass over both would cancel where the mean is large.
            wide = wide - total(wide.sum(-1, keepdim=True)) / features
        variance = total(wide.square().sum(-1, keepdim=True)) / features
        normal = wide * torch.rsqrt(variance + self.epsilon)
        if weight is None:
            return normal.to(x.dtype)
        gain = weight.float() + 1.0 if self.unit_offset else weight
        if self.gain_in_fp32:
            out = normal * gain.float()
            if bias is not None:
                out = out + bias.float()
            return out.to(x.dtype)
        out = gain * normal.to(x.dtype)
        return out if bias is None else out + bias


def epsilon_of(module: nn.Module) -> float | None:
    return first_attribute(module, _EPSILON_NAMES, float)


def recognise(module: nn.Module) -> Formula | None:
    """The formula that a norm's own forward follows, or None."""
    stated = epsilon_of(module)
    epsilons = _USUAL_EPSILONS if stated is None else (stated,)
    features = 16
    small = copy.copy(module)  # shallow: its parameters are replaced below, the module's own stay
    small._parameters = dict(module._parameters)
    if hasattr(small, "normalized_shape"):
        small.normalized_shape = (features,)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(8, features, generator=generator) * 3 + 1
    probe[4:] *= 1e-3  # rows so small that epsilon decides
    stored = {
        key: torch.randn(features, generator=generator) * 0.5 + (1.0 if key == "weight" else 0.3)
        for key, value in module._parameters.items()
        if value is not None
    }
    if not set(stored) <= {"weight", "bias"}:
        return None
    best: tuple[float, Formula] | None = None
    choices = itertools.product((False, True), (False, True), (True, False), epsilons)
    for centred, offset, fp32, epsilon in choices:
        formula = Formula(centred, offset, fp32, epsilon)
        if _error(small, formula, probe, stored, torch.float32) > 1e-5:
            continue
        # The order of roundings matters only in bf16: among those that agree in fp32, take the nearest in bf16.
        error = _error(small, formula, probe, stored, torch.bfloat16)
        if error < 2e-2 and (best is None or error < best[0]):
            best = (error, formula)
    return best[1] if best else None


def _error(
    module: nn.Module, formula: Formula, probe: Tensor, stored: dict[str, Tensor], dtype: torch.dtype
) -> float:
    """The error of a formula against a module's forward, relative to the largest value; infinite if not comparable."""
    x = probe.to(dtype)
    parameters = {key: value.to(dtype) for key, value in stored.items()}
    for key, value in parameters.items():
        module._parameters[key] = nn.Parameter(value, requires_grad=False)
    try:
        with torch.no_grad(), torch.device("cpu"):
            theirs = module(x)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return float("inf")
    ours = formula.apply(
        x, x.shape[-1], parameters.get("weight"), parameters.get("bias"), lambda total: total
    )
    if not isinstance(theirs, Tensor) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return float("inf")
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
