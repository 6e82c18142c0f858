"""Agreements between hosts: small Python objects and flags, outside a step and not counted as its traffic.

The collectives of a step are in `mesh/collectives.py`. Between them these two modules hold every call of a collective of
`torch.distributed`, except for those that `fourfold calibrate` times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: all ranks


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
