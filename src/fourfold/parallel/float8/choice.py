"""Which linears compute in float8, and whether a device can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import linear_shape, linears_of_blocks
from fourfold.mesh.grid import Grid
from fourfold.weights.api import Precision

Float8Recipe = Literal["none", "rowwise_with_gw_hp"]

_MULTIPLE = 16  # of features, for the matmul of CUDA devices
_CAPABILITY = (8, 9)  # the first devices with matmuls of e4m3


def linears_in_float8(model: nn.Module) -> tuple[set[str], list[str]]:
    """The linears of the blocks by name: those that compute in float8, and the others, whose sizes are not multiples of 16.

    The sizes are those of the whole model, so that every grid has the same ones.
    """
    chosen: set[str] = set()
    others: list[str] = []
    sizes = ""
    for name, module in linears_of_blocks(model).items():
        in_features, out_features = linear_shape(module)
        is_plain = type(module).forward in (nn.Linear.forward, Conv1D.forward)
        if is_plain and in_features % _MULTIPLE == 0 == out_features % _MULTIPLE:
            chosen.add(name)
        else:
            others.append(name)
            sizes = sizes or f"{name} has {in_features} input and {out_features} output features"
    if not chosen:
        raise UnsupportedError(
            f"none of the {len(others)} linears in the blocks of {type(model).__name__} can compute in float8: "
            f"{sizes or 'there is none'}, and both have to be multiples of {_MULTIPLE}; use float8='none'"
        )
    return chosen, others


def check_device(grid: Grid, precision: Precision) -> None:
    """Can the devices of the grid multiply e4m3?"""
    if grid.target == "cuda" and precision != "bf16":
        raise ValueError(
            f"float8 with precision={precision!r} is for CPUs alone: on CUDA devices its matmuls give bf16; use precision='bf16'"
        )
    if grid.device.type != "cuda":
        return
    name = torch.cuda.get_device_name(grid.device)
    if torch.version.hip is not None:
        raise UnsupportedError(
            f"float8 on {name} needs another format than e4m3fn, or has not been tried there; use float8='none'"
        )
    capability = torch.cuda.get_device_capability(grid.device)
    if capability < _CAPABILITY:
        raise UnsupportedError(
            f"{name} has the compute capability {'.'.join(map(str, capability))}, but matmuls in float8 need "
            f"{'.'.join(map(str, _CAPABILITY))}; use float8='none'"
        )


def check_pieces(
    name: str, grid: Grid, in_features: int, in_parts: int, widths: Sequence[int], out_parts: int
) -> None:
    """Does each matmul of a linear have sizes that the device can multiply, where ranks have these parts of its features?"""
    if grid.target != "cuda":
        return
    for what, size, parts in (("input", in_features, in_parts), *(("output", w, out_parts) for w in widths)):
        if size // parts % _MULTIPLE:
            raise UnsupportedError(
                f"{name} multiplies {size // parts} of its {size} {what} features at once on x={grid.x}, y={grid.y}, and in float8 "
                f"they have to be a multiple of {_MULTIPLE}; use a smaller x or y, or float8='none'"
            )
