"""A world of any size in one process: the `fake` backend completes every collective at once and sends nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

# What DTensor found out on one mesh it would use on the next of the same shape, whose groups are others (torch 2.13.0).
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.mesh.axes import AXES
from fourfold.mesh.grid import Grid


@contextmanager
def fake_grid(shape: tuple[int, int, int, int], *, rank: int = 0, target: str = "cuda") -> Iterator[Grid]:
    """The grid as ``rank`` sees it, decisions made for ``target`` devices; its tensors are on the CPU."""
    world = math.prod(shape)
    if dist.is_initialized():
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already; a dry run makes a world of its "
            f"own, of {world} ranks: start it in another process"
        )
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of the {world} ranks of {shape}; use 0 to {world - 1}")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
        yield Grid.from_mesh(mesh, torch.device("cpu"), target=target)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
