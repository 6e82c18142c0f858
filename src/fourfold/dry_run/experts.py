"""What stands for the grouped matmul of experts in a dry run: in fp32 it has no implementation for fake tensors, Hugging Face's fallback has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.integrations import moe

from fourfold.dry_run.recorder import replaced


def _in_bf16(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
    return weight.dtype == torch.bfloat16


@contextmanager
def grouped_matmuls_with_shapes() -> Iterator[None]:
    # There is no public choice of it (transformers 5.22.2).
    with replaced(moe, "_can_use_grouped_mm", _in_bf16):
        yield
