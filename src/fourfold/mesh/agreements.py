"""Agreements between hosts: small Python objects and flags, outside a step and not counted as its traffic.

The collectives of a step are in `mesh/collectives.py`. Between them these two modules hold every call of a collective of
`torch.distributed`, except for those that `fourfold calibrate` times.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: all ranks
_LAZY = (
    "TORCH_GLOO_LAZY_INIT"  # Gloo's ranks connect when they first exchange something (seen in torch 2.13.0)
)


def host_group(timeout_s: float) -> dist.ProcessGroup:
    """A Gloo group of all ranks, for values that the host reads, also with NCCL. All ranks create it.

    Its ranks connect to those that they exchange something with: an all-reduce needs two neighbours. Connected at once, each
    rank would have a socket to every other one.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


def broadcast_object(value: T, group: Group = None) -> T:
    """The value that rank 0 passes, on all ranks."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return cast(T, values[0])


def gather_objects(value: T, group: Group = None) -> list[T]:
    """The values of all ranks, on all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def any_rank(flag: bool, group: Group = None) -> Callable[[], bool]:
    """Start to ask whether the flag is set on any rank of a CPU group; the returned function waits for the answer."""
    found = torch.tensor([int(flag)], dtype=torch.uint8)
    work = cast(dist.Work, dist.all_reduce(found, dist.ReduceOp.MAX, group, async_op=True))

    def answer() -> bool:
        work.wait()
        return bool(found.item())

    return answer


def barrier(group: Group = None) -> None:
    """Wait until all ranks are here."""
    dist.barrier(group)
