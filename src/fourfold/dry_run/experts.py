"""What experts have in a dry run in place of values and of kernels without shapes.

In fp32 the grouped matmul has no implementation for fake tensors, Hugging Face's fallback has. The rows that a rank gets are those of an
expected load: of the fullest rank, as a multiple of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from transformers.integrations import moe

from fourfold.dry_run.recorder import replaced
from fourfold.mesh.rows import expected_load

# Rows of the rank with most, as a multiple of the mean; "worst": all that routers can send to one rank.
ExpertLoad = float | Literal["worst"]


def _in_bf16(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
    return weight.dtype == torch.bfloat16


@contextmanager
def experts_without_values(load: ExpertLoad) -> Iterator[None]:
    # There is no public choice of it (transformers 5.22.2).
    most = math.inf if load == "worst" else float(load)
    with replaced(moe, "_can_use_grouped_mm", _in_bf16), expected_load(most):
        yield
