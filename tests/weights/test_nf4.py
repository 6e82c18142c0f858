"""NF4: the numbers are those of its definition, and of bitsandbytes, bit for bit."""

import pytest
import torch
from torch import Tensor

from fourfold.weights.nf4 import VALUES, dequantize, quantize
from fourfold.weights.quantization import BLOCK, BLOCK_BYTES
from tests.models import random


def rounded(weight: Tensor) -> Tensor:
    """Each number by the nearest of the 16 values, over 64 consecutive numbers of the whole weight."""
    blocks = weight.detach().float().flatten().view(-1, 64)
    scales = blocks.abs().max(dim=1, keepdim=True).values
    values = torch.tensor(VALUES)
    distances = ((blocks * (1 / scales)).double().unsqueeze(-1) - values).abs()
    return (values[distances.argmin(-1)] * scales).view(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_the_nearest_values_of_each_block(dtype: torch.dtype) -> None:
    weight = (random(96, 256) * torch.logspace(-6, 3, 96)[:, None]).to(dtype)
    packed = quantize(weight)
    assert (packed.dtype, packed.shape) == (torch.uint8, (96, 256 // BLOCK * BLOCK_BYTES))
    assert torch.equal(dequantize(packed, torch.float32), rounded(weight))
    assert torch.equal(dequantize(packed, torch.bfloat16), rounded(weight).to(torch.bfloat16))


def test_rows_and_whole_blocks_may_be_cut_and_put_together() -> None:
    weight = random(6, 256)
    packed = quantize(weight)
    assert torch.equal(quantize(weight[2:4, 128:]), packed[2:4, 2 * BLOCK_BYTES :])
    assert torch.equal(dequantize(packed[2:4, 2 * BLOCK_BYTES :], torch.float32), rounded(weight)[2:4, 128:])
    assert quantize(weight[:0]).shape == (0, 4 * BLOCK_BYTES)
    assert dequantize(packed[:0], torch.float32).shape == (0, 256)


def test_large_weights_go_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(7, 128)
    monkeypatch.setattr("fourfold.weights.nf4.UNPACKED_AT_ONCE", 300)
    assert torch.equal(dequantize(quantize(weight), torch.float32), rounded(weight))


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 5] = -3.0
    assert torch.equal(dequantize(quantize(weight), torch.float32), weight)


def test_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of 96 numbers are not whole blocks of 64"):
        quantize(random(2, 96))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = (random(128, 512) * torch.logspace(-4, 2, 128)[:, None]).to(dtype)
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    packed = quantize(weight)
    codes, scales = packed.unflatten(1, (-1, BLOCK_BYTES)).split([BLOCK // 2, 4], dim=-1)
    assert torch.equal(codes.flatten(), theirs.flatten())
    assert torch.equal(scales.view(torch.float32).flatten(), state.absmax)
    assert torch.equal(dequantize(packed, dtype), functional.dequantize_4bit(theirs, state))
