"""MFU: a model's FLOPs relative to the peak of a device's data sheet. Unknown devices have none."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.workload import from_config

# Pattern of torch.cuda.get_device_name, and the preset with that device. PCIe cards are slower, and not listed.
_PRESET_OF = (
    (r"A100.*SXM", "perlmutter-80g"),
    (r"GH200", "alps-gh200"),
    (r"H100 80GB HBM3", "dgx-h100"),
    (r"\bH200$", "aws-p5en"),
    (r"GB200", "gb200-nvl72"),
    (r"\bB200", "dgx-b200"),
    (r"MI250X", "frontier"),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of the data sheet for dense bf16 matmuls; None on CPUs, in fp32, and on devices without a preset."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """
    Example:
        >>> peak_by_name("NVIDIA A100-SXM4-80GB")
        312000000000000.0
    """
    for pattern, preset in _PRESET_OF:
        if re.search(pattern, name):
            tflops = clusters.preset(preset).device.spec_tflops
            return None if tflops is None else tflops * 1e12
    return None


def flops_per_token(model: nn.Module, length: int) -> float | None:
    """FLOPs of forward and backward, as the planner counts them; None for a family that it does not know."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    try:
        return from_config(config.to_dict()).model_flops(1.0, length)
    except ValueError:
        return None
