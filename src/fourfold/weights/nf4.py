"""NF4: a frozen weight as four bits for each number, and a scale for each 64, as in QLoRA (Dettmers et al., 2023).

A block is 64 consecutive numbers of a row of the whole weight, [out, in]. So no grid changes it, if a rank has whole blocks of each of
its rows. Its scale is its largest magnitude; each number over the scale becomes the nearest of 16 values. Blocks and values are those of
bitsandbytes, for which blocks run on from row to row: that is the same where 64 divides the rows.

A packed weight is one tensor of bytes, [out, in / 64 * 36]: of each block 32 bytes with two numbers each, the first in the upper four
bits, then its scale in fp32. It is sharded and gathered as any weight is, by rows over z, and by whole blocks over another axis.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from fourfold.weights.quantization import BLOCK, BLOCK_BYTES, SCALE_BYTES, UNPACKED_AT_ONCE

# The quantiles of a normal distribution, over the largest; with a 0 (appendix E of the paper).
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_ZERO = VALUES.index(0.0)


def is_packed(tensor: Tensor) -> bool:
    """Is this a weight of packed numbers?"""
    return tensor.dtype == torch.uint8


def numbers(packed: Tensor) -> torch.Size:
    """The shape of the weight that is packed."""
    return torch.Size((packed.shape[0], packed.shape[1] // BLOCK_BYTES * BLOCK))


@torch.no_grad()
def quantize(weight: Tensor) -> Tensor:
    """The packed form of a weight, or of whole blocks of some of its rows.

    Example:
        >>> packed = quantize(torch.tensor([[-2.0, 0.0, 1.4] + [2.0] * 61]))
        >>> packed.shape, packed[0, :2].tolist()  # the indices 0 and 7, 14 and 15
        (torch.Size([1, 36]), [7, 239])
        >>> dequantize(packed, torch.float32)[0, :3].tolist()
        [-2.0, 0.0, 1.4459136724472046]
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(
            f"rows of {columns} numbers are not whole blocks of {BLOCK} for NF4; use quantization='none'"
        )
    packed = torch.empty(rows, columns // BLOCK, BLOCK_BYTES, dtype=torch.uint8, device=weight.device)
    if not weight.is_meta:
        values = torch.tensor(VALUES, dtype=torch.float32, device=weight.device)
        bounds = (values[1:] + values[:-1]) / 2
        for some in _parts(rows, columns):
            blocks = weight[some].float().unflatten(1, (-1, BLOCK))
            scales = blocks.abs().amax(dim=-1, keepdim=True)
            codes = torch.bucketize(blocks * scales.reciprocal(), bounds, out_int32=True)
            codes = codes.where(scales > 0, _ZERO).to(torch.uint8)
            packed[some, :, : BLOCK // 2] = (codes[..., ::2] << 4) | codes[..., 1::2]
            packed[some, :, BLOCK // 2 :] = scales.view(torch.uint8)
    return packed.flatten(1)


@torch.no_grad()
def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a packed weight, or of some of its rows: in fp32 the value times the scale, then rounded to ``dtype``."""
    shape = numbers(packed)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    blocks, pairs = packed.unflatten(1, (-1, BLOCK_BYTES)), _pairs(packed)
    for some in _parts(*shape):
        codes, scales = blocks[some].split([BLOCK // 2, SCALE_BYTES], dim=-1)
        values = nn.functional.embedding(codes.to(torch.int32), pairs).flatten(-2)
        torch.mul(values, scales.view(torch.float32), out=out[some].unflatten(1, (-1, BLOCK)))
    return out


def _parts(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, UNPACKED_AT_ONCE // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _pairs(packed: Tensor) -> Tensor:
    """[256, 2]: the two values of each byte."""
    make = _pairs_on.__wrapped__ if isinstance(packed, FakeTensor) else _pairs_on
    return make(packed.device)


@functools.cache
def _pairs_on(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        values = torch.tensor(VALUES, dtype=torch.float32, device=device)
        return torch.stack([values.repeat_interleave(len(VALUES)), values.repeat(len(VALUES))], dim=1)


def packed_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The packed form of this rank's block of a parameter."""
    if not isinstance(parameter, DTensor):
        return nn.Parameter(quantize(parameter.detach()), requires_grad=False)
    sharded = cast(DTensor, parameter)
    rows, columns = sharded.shape
    shape = torch.Size((rows, columns // BLOCK * BLOCK_BYTES))
    packed = DTensor.from_local(
        quantize(sharded._local_tensor.detach()),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )
    return nn.Parameter(packed, requires_grad=False)
