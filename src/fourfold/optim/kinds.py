"""The optimizers that a run can have. Does not import torch: run configs and the planner's formulas need it, too."""

from typing import Literal

# AdamW; with its two moments in bf16; Muon for the matrices of blocks with AdamW for the rest.
Optimizer = Literal["adamw", "adamw-bf16", "muon"]

PART = 2**24  # elements whose moments are widened from bf16 at a time: 128 MiB
_LARGEST_BETA2 = 0.99


def check_beta2(beta2: float) -> None:
    """In bf16 the second moment has to change by more than is rounded away (1/256)."""
    if beta2 > _LARGEST_BETA2:
        raise ValueError(
            f"beta2={beta2:g} changes the second moment by {1 - beta2:.2g} of itself in a step, which bf16 rounds away; use at most "
            f"{_LARGEST_BETA2}, or AdamW with moments in fp32"
        )
