"""The optimizers that a run can have. Does not import torch: run configs and the planner's formulas need it, too."""

from typing import Literal

# AdamW; with its two moments in bf16; Muon for the matrices of blocks with AdamW for the rest.
Optimizer = Literal["adamw", "adamw-bf16", "muon"]

# In bf16 the second moment has to change by more than is rounded away (1/256): by 1 - beta2 of itself in a step.
LARGEST_BETA2 = 0.99
PART = 2**24  # elements whose moments are widened at a time: 128 MiB
