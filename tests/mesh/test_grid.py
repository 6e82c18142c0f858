"""The grid: coordinates, rows of the batch, timeouts, and joining under Slurm and torchrun."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import fourfold
from benchmarks.ranks import RankPool
from fourfold.mesh.axes import AXES, factorisations
from fourfold.mesh.grid import Grid

Shape = tuple[int, int, int, int]

# -- factorisations ----------------------------------------------------------------------------------------------------


def test_numbers_of_factorisations() -> None:
    assert [len(factorisations(ranks)) for ranks in (1, 2, 8, 16)] == [1, 4, 20, 35]
    # 2^15 ranks: 15 twos over 4 axes, (18 choose 3)
    assert len(factorisations(32768)) == 816


@given(st.integers(1, 200))
def test_factorisations_are_complete(ranks: int) -> None:
    found = factorisations(ranks)
    assert all(math.prod(shape) == ranks and min(shape) >= 1 for shape in found)
    assert len(set(found)) == len(found)
    # The e copies of each prime are distributed over 4 axes: (e + 3 choose 3) ways.
    expected, left, prime = 1, ranks, 2
    while left > 1:
        copies = 0
        while left % prime == 0:
            left, copies = left // prime, copies + 1
        expected *= math.comb(copies + 3, 3)
        prime += 1
    assert len(found) == expected


# -- coordinates and rows, for each rank of a fake process group ---------------------------------------------


@contextmanager
def fake_grid(shape: Shape, rank: int) -> Iterator[Grid]:
    """The grid as one rank sees it; its process group sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        yield Grid.create(shape, device_type="cpu")
    finally:
        dist.destroy_process_group()


shapes = st.integers(1, 16).flatmap(lambda ranks: st.sampled_from(factorisations(ranks)))


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(1, 3))
def test_coordinates_and_rows(shape: Shape, rows_each: int) -> None:
    data, z, y, x = shape
    global_batch = rows_each * data * z
    readers: dict[int, set[tuple[int, int]]] = {row: set() for row in range(global_batch)}
    found = set()
    for rank in range(math.prod(shape)):
        with fake_grid(shape, rank) as grid:
            coordinates = {axis: grid.coordinate(axis) for axis in AXES}
            rows = range(global_batch)[grid.local_rows(global_batch)]
            assert grid.shape == shape
            assert tuple(grid.size(axis) for axis in AXES) == shape
            assert grid.batch_ranks == data * z
        # x innermost, then y, z, data
        assert (
            rank
            == ((coordinates["data"] * z + coordinates["z"]) * y + coordinates["y"]) * x + coordinates["x"]
        )
        assert len(rows) == rows_each
        found.add(tuple(coordinates.values()))
        for row in rows:
            readers[row].add((coordinates["data"], coordinates["z"]))
    assert len(found) == math.prod(shape)
    # Each row belongs to one coordinate on (data, z), and all its x and y ranks read it; otherwise the sets would be larger.
    assert all(len(owners) == 1 for owners in readers.values())
    assert len(set.union(*readers.values())) == data * z


def describe_rank(shape: Shape) -> tuple[dict[str, int], dict[str, list[int]], tuple[int, int], int]:
    grid = Grid.create(shape)
    groups = {axis: dist.get_process_group_ranks(grid.mesh.get_group(axis)) for axis in AXES}
    rows = grid.local_rows(8)
    total = torch.tensor(dist.get_rank())
    grid.collectives.all_reduce(total, "x", "check").wait()
    return {axis: grid.coordinate(axis) for axis in AXES}, groups, (rows.start, rows.stop), int(total)


def test_coordinates_groups_and_rows_of_eight_ranks(pool: RankPool) -> None:
    ranks = pool.run(describe_rank, 8, (2, 2, 1, 2))
    assert [tuple(coordinates.values()) for coordinates, *_ in ranks] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 1, 0, 0),
        (0, 1, 0, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
        (1, 1, 0, 0),
        (1, 1, 0, 1),
    ]
    assert ranks[5][1] == {"data": [1, 5], "z": [5, 7], "y": [5], "x": [4, 5]}
    assert [rows for _, _, rows, _ in ranks] == [
        (0, 2),
        (0, 2),
        (2, 4),
        (2, 4),
        (4, 6),
        (4, 6),
        (6, 8),
        (6, 8),
    ]
    assert [total for *_, total in ranks] == [1, 1, 5, 5, 9, 9, 13, 13]


# -- timeouts ---------------------------------------------------------------------------------------------------------


def timeouts_of(shape: Shape, timeout_s: float) -> dict[str, timedelta]:
    grid = Grid.create(shape, timeout_s=timeout_s)
    cpu = torch.device("cpu")
    return {
        axis: grid.mesh.get_group(axis)._get_backend(cpu).options._timeout
        for axis in AXES
        if grid.size(axis) > 1
    }


@pytest.mark.parametrize(
    "shape", [(1, 2, 2, 2), (2, 2, 1, 2), pytest.param((1, 1, 1, 8), marks=pytest.mark.nightly)]
)
def test_axis_groups_have_the_given_timeout(shape: Shape, pool: RankPool) -> None:
    axes = {axis for axis, size in zip(AXES, shape, strict=True) if size > 1}
    for timeout_s in (41.0, 67.5):  # the second grid shares the groups of the first, and sets its own
        for found in pool.run(timeouts_of, 8, shape, timeout_s):
            assert found == dict.fromkeys(axes, timedelta(seconds=timeout_s))


def lose_a_peer(timeout_s: float, gave_up: Path) -> tuple[float, str]:
    """On (1, 1, 2, 2) rank 3 skips the all-reduce over x; returns how long the others wait, and their error."""
    grid = Grid.create((1, 1, 2, 2), timeout_s=timeout_s)
    message = ""
    start_s = time.monotonic()
    if dist.get_rank() == 3:
        while not gave_up.exists() and time.monotonic() < start_s + 60:
            time.sleep(0.05)
    else:
        try:
            grid.collectives.all_reduce(torch.zeros(1), "x", "activation").wait()
        except RuntimeError as error:
            message = str(error)
            gave_up.touch()
    waited_s = time.monotonic() - start_s
    dist.destroy_process_group()  # the group is broken: the pool must not use these ranks again
    return waited_s, message


@pytest.mark.nightly
def test_a_lost_peer_ends_the_wait(pool: RankPool, tmp_path: Path) -> None:
    timeout_s = 2.0
    waits = pool.run(lose_a_peer, 4, timeout_s, tmp_path / "gave_up")
    assert [message for _, message in waits[:2]] == ["", ""]  # they belong to another x group
    waited_s, message = waits[2]
    assert "imed out" in message
    assert timeout_s * 0.9 <= waited_s < timeout_s + 8


# -- joining a process group ---------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from fourfold import Grid

assert not dist.is_initialized()
grid = Grid.create((1, 1, 1, 2), device_type="cpu", timeout_s=60)
total = torch.tensor([grid.coordinate("x") + 1.0])
grid.collectives.all_reduce(total, "x", "check").wait()
found = {"backend": dist.get_backend(), "x": grid.coordinate("x"), "total": total.item()}
found |= {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
open(os.path.join(sys.argv[1], f"rank-{dist.get_rank()}.json"), "w").write(json.dumps(found))
dist.destroy_process_group()
# A thread of Gloo may let go of the last collective while Python ends, which aborts the process (torch 2.13.0, stock PyTorch as well).
os._exit(0)
"""


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables of a process group."""
    marks = ("SLURM_", "TORCHELASTIC_", "MASTER_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(marks)}
    source = str(Path(fourfold.__file__).parents[1])
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": loopback}


def free_port(low: int, high: int) -> int:
    for port in range(low + os.getpid() % 1000, high):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise OSError(f"no free port in {low}..{high}")


def check_joined(folder: Path, master: str) -> None:
    for rank in (0, 1):
        assert json.loads((folder / f"rank-{rank}.json").read_text()) == {
            "backend": "gloo",
            "x": rank,
            "total": 3.0,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": master,
        }


def test_slurm(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # The port is 20000 + job % 20000.
    job = {"SLURM_JOB_ID": str(40_000 + free_port(20_000, 40_000) - 20_000), "SLURM_NTASKS": "2"}
    job |= {"SLURM_JOB_NODELIST": "elsewhere[1-2]", "SLURM_STEP_NODELIST": "localhost,elsewhere[1-2]"}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env=clean_environment() | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for task in tasks:
            _, errors = task.communicate(timeout=150)
            assert task.returncode == 0, errors
    finally:
        for task in tasks:
            task.kill()
    check_joined(tmp_path, "localhost")


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    world = [
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port(40_000, 60_000)),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *world, str(script), str(tmp_path)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    check_joined(tmp_path, "127.0.0.1")
