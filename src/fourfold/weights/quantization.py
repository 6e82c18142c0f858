"""The formats in which frozen weights are stored, and their sizes; without torch, for run configs and plans."""

from __future__ import annotations

from typing import Literal

Quantization = Literal["none", "nf4"]

# NF4: numbers of a row that share a scale, and the bytes of both.
BLOCK = 64
SCALE_BYTES = 4
BLOCK_BYTES = BLOCK // 2 + SCALE_BYTES
BYTES_PER_NUMBER = BLOCK_BYTES / BLOCK
# Numbers that are unpacked at once; each takes an index of two bytes and an fp32 value in between.
UNPACKED_AT_ONCE = 1 << 22
BYTES_BETWEEN = 6
