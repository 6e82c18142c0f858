"""Agreements between hosts."""

import os
import stat
from contextlib import suppress

import torch.distributed as dist

from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh.agreements import any_rank, gather_objects, host_group
from fourfold.mesh.axes import AXES


def sockets() -> set[int]:
    """The inodes of this process's open sockets."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself is closed again
            status = os.fstat(int(fd))
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return found


def count_sockets() -> tuple[int, bool, list[int], bool]:
    """The sockets of a group after an all-reduce and a gather, and what both gave."""
    dist.barrier()
    before = sockets()
    group = host_group(60)
    flag = any_rank(dist.get_rank() == 3, group)()
    ranks = gather_objects(dist.get_rank(), group)
    opened = len(sockets() - before)  # those of earlier tests' groups may close meanwhile
    dist.barrier()  # a rank that leaves the group closes its neighbours' sockets too: all count before
    dist.destroy_process_group(group)
    return opened, flag, ranks, "TORCH_GLOO_LAZY_INIT" in os.environ


def test_ranks_connect_only_to_those_they_exchange_something_with(pool: RankPool) -> None:
    for opened, flag, ranks, is_set in pool.run(count_sockets, 8):
        assert (
            opened == 3
        )  # one that listens, and the two neighbours of a ring; connected to all it would be 8
        assert flag
        assert ranks == list(range(8))
        assert not is_set


def groups_of(*shapes: tuple[int, int, int, int]) -> int:
    """The process groups that a rank has for these grids."""
    names = {dist.group.WORLD.group_name}  # type: ignore[union-attr]
    for shape in shapes:
        grid = Grid.create(shape)
        names |= {grid.mesh.get_group(axis).group_name for axis in AXES}
    return len(names)


def test_a_rank_has_a_group_for_the_world_and_for_each_axis(pool: RankPool) -> None:
    # On CUDA each is a communicator: five, on any number of ranks. Equal grids share them.
    assert pool.run(groups_of, 4, (1, 2, 1, 2), (1, 2, 1, 2)) == [5] * 4
    # An axis of all ranks uses that of the world.
    assert pool.run(groups_of, 4, (1, 4, 1, 1)) == [4] * 4
