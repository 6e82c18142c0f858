"""What a launcher has set that does not go with a grid."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from fourfold.errors import UnsupportedError

# What `accelerate launch` sets, by its options or its config file.
_BACKENDS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
}


def check_backends() -> None:
    """Is accelerate asked to place models itself?"""
    for name, words in _BACKENDS.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise UnsupportedError(
                f"{name}={os.environ[name]}: accelerate is configured for {words}, and the grid says what is parallel; start with a "
                "plain `accelerate launch`, with torchrun, or with srun"
            )


def check_rank(args: Any) -> None:
    """Does accelerate, which reads the variables of a launcher once, know which rank this is?"""
    if args.process_index != dist.get_rank():
        raise ValueError(
            f"accelerate takes rank {dist.get_rank()} for process {args.process_index}, because it was asked before RANK was set; under "
            "srun begin the script with grid = ff.Grid.create((data, z, y, x)), make the arguments after it, and pass grid=grid"
        )
