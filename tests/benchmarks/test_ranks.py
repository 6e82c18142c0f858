"""The pool runs functions on ranks, and says clearly what went wrong when it does not."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.ranks import RankError, RankPool


def sum_of_ranks(scale: int = 1) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def environment() -> dict[str, str]:
    return {
        k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    }


def process_id() -> int:
    return os.getpid()


def fail_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        raise ArithmeticError(f"rank {bad_rank} cannot count")
    wait_for_nobody()


def die_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_nobody() -> None:
    time.sleep(300)


def wait_unless_last() -> None:
    if dist.get_rank() < dist.get_world_size() - 1:
        wait_for_nobody()


def leave_the_group() -> None:
    dist.barrier()
    dist.destroy_process_group()


def begin_the_group_again() -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()


def product_of_shards(rows: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    product = sharded @ distribute_tensor(torch.eye(4), mesh, [Replicate()])
    assert isinstance(product, DTensor)
    return product.full_tensor()


def threads_of_the_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def make_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group()
    return os.getpid()


def unpicklable() -> object:
    return lambda: None


def assert_usable(pool: RankPool, world_size: int) -> None:
    expected = float(sum(range(world_size)))
    assert pool.run(sum_of_ranks, world_size) == [(r, world_size, expected) for r in range(world_size)]


def test_results_come_in_rank_order_and_ranks_reach_each_other(pool: RankPool) -> None:
    results = pool.run(sum_of_ranks, 4, scale=3)
    assert results == [(rank, 4, 3.0 * 6) for rank in range(4)]


def test_environment_is_as_under_torchrun(pool: RankPool) -> None:
    for rank, seen in enumerate(pool.run(environment, 2)):
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }


def test_ranks_live_on_between_runs_of_several_world_sizes(pool: RankPool) -> None:
    first = {world: pool.run(process_id, world) for world in (4, 8, 2)}
    for world in (4, 8, 2):
        assert_usable(pool, world)
        assert pool.run(process_id, world) == first[world]


def test_tensors_return_and_meshes_of_an_earlier_world_do_no_harm(pool: RankPool) -> None:
    expected = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    for world in (4, 8, 4):
        for result in pool.run(product_of_shards, world, 8):
            torch.testing.assert_close(result, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_forked_from_a_server_without_threads(pool: RankPool) -> None:
    assert pool.run(threads_of_the_server, 1) == [1]


def test_ranks_that_hold_many_groups_are_replaced(pool: RankPool) -> None:
    assert pool.run(make_groups, 2, 100) != pool.run(process_id, 2)


def test_world_size_beyond_the_pool_is_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world_size=17.*1\.\.16"):
        pool.run(process_id, 17)


def test_local_function_is_refused_with_the_way_out(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="top level"):
        pool.run(lambda: None, 2)


def test_traceback_of_the_failing_rank_shows_without_waiting_for_the_rest(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 2 cannot count") as caught:
        pool.run(fail_on, 4, 2, timeout_s=600.0)
    assert caught.value.rank == 2
    assert "killed while still running, 2 s later: ranks [0, 1, 3]" in str(caught.value)
    assert "in fail_on" in str(caught.value)
    assert_usable(pool, 4)


def test_result_that_cannot_be_sent_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="lambda"):
        pool.run(unpicklable, 2)
    assert_usable(pool, 2)


def test_killed_rank_is_named_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"exit code -9 \(SIGKILL\)") as caught:
        pool.run(die_on, 4, 1)
    assert caught.value.rank == 1
    assert_usable(pool, 4)


def test_rank_killed_while_idle_is_named(pool: RankPool) -> None:
    os.kill(pool.run(process_id, 2)[1], signal.SIGKILL)
    with pytest.raises(RankError, match="SIGKILL") as caught:
        pool.run(sum_of_ranks, 2)
    assert caught.value.rank == 1
    assert_usable(pool, 2)


def test_hang_shows_the_stack_of_every_rank(pool: RankPool) -> None:
    assert_usable(pool, 4)
    with pytest.raises(RankError) as caught:
        pool.run(wait_unless_last, 4, timeout_s=5.0)
    _, *stacks = str(caught.value).split("--- rank ")
    assert len(stacks) == 4
    for rank, stack in enumerate(stacks[:3]):
        assert stack.startswith(f"{rank} (still running)")
        assert "wait_for_nobody" in stack
    assert stacks[3].startswith("3 (has returned)")
    assert_usable(pool, 4)


@pytest.mark.parametrize("ending", [leave_the_group, begin_the_group_again])
def test_function_may_end_the_process_group(pool: RankPool, ending: object) -> None:
    pool.run(ending, 2)  # type: ignore[arg-type]
    assert_usable(pool, 2)


@pytest.mark.parametrize("way", ["script", "module"])
@pytest.mark.nightly
def test_functions_of_the_main_module_run_and_main_is_not_run_again(tmp_path: Path, way: str) -> None:
    (tmp_path / "counting.py").write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            import torch.distributed as dist
            from benchmarks.ranks import RankPool

            @dataclass
            class Seen:
                rank: int

            def see():
                return Seen(dist.get_rank())

            if __name__ == "__main__":
                print("main runs", flush=True)
                with RankPool(2) as pool:
                    print(pool.run(see, 2))
        """)
    )
    command = [sys.executable, "counting.py"] if way == "script" else [sys.executable, "-m", "counting"]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["main runs", "[Seen(rank=0), Seen(rank=1)]"]


@pytest.mark.nightly
def test_ranks_end_when_their_caller_is_killed(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(
        textwrap.dedent("""
            import os, time
            from benchmarks.ranks import RankPool

            def show_and_wait():
                open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
                time.sleep(100)

            if __name__ == "__main__":
                RankPool(2).run(show_and_wait, 2)
        """)
    )
    with subprocess.Popen([sys.executable, "caller.py"], cwd=tmp_path, env=_environment()) as caller:
        try:
            pids = [_wait_for_number(tmp_path / f"pid-{rank}") for rank in range(2)]
        finally:
            caller.kill()
    until = time.monotonic() + 60.0
    while any(_is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_is_running(pid) for pid in pids)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _wait_for_number(path: Path, timeout_s: float = 60.0) -> int:
    until = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, f"{path.name} was not written"
        time.sleep(0.1)
    return int(path.read_text())


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
