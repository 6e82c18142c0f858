"""Compute and exposed seconds, measured apart, add up to the step; and the seconds land on the axis that was slow."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold.mesh.clock import moment
from fourfold.mesh.collectives import Collectives
from fourfold.mesh.grid import Grid

STEPS = 11  # so many that what else the machine does stays out of the median
UNACCOUNTED = 0.05


def stolen_s() -> float:
    """Seconds for which a hypervisor kept cores to itself: those of the core that a thread had are in nobody's account."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


def steps(
    shape: tuple[int, int, int, int], weights: str, fault: bool
) -> list[tuple[float, float, float, float]]:
    """(step, compute, exposed, stolen) seconds of some steps, after the first two."""
    grid = Grid.create(shape, timeout_s=60)
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, vocab_size=512,
                         num_attention_heads=8, num_key_value_heads=8)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    ff.parallelize(model, grid, weights=weights)
    ids = torch.randint(512, (4, 128))[grid.local_rows(4)]
    seen = []
    kept = Collectives._add_exposed
    if fault:  # the other rank is late, and waits for activations are forgotten
        late = 0.05 if dist.get_rank() == 1 else 0.0
        model.model.layers[0].register_forward_hook(lambda *_: time.sleep(late))
        Collectives._add_exposed = lambda self, key, s: None if key[2] == "activation" else kept(self, key, s)  # type: ignore[method-assign]
    try:
        for _ in range(STEPS + 2):
            dist.barrier()
            before_s = stolen_s()
            with ff.measure_step(grid) as report:
                model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
            seen.append((report.step_s, report.compute_s, report.exposed_s(), stolen_s() - before_s))
    finally:
        Collectives._add_exposed = kept  # type: ignore[method-assign]
    return seen[2:]


def unaccounted(reports: list[list[tuple[float, float, float, float]]]) -> float:
    """The share of the step that is none of them, or twice there, in the median step of the worst rank."""
    shares = []
    for rank in reports:
        other = [(s - c - e, stolen, s) for s, c, e, stolen in rank]
        # What was stolen, at most of all cores, can be missing; it is never too much.
        shares.append(sorted(max(o - stolen, -o) / s for o, stolen, s in other)[STEPS // 2])
    return max(shares)


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)])
def test_compute_and_exposed_make_the_step(
    shape: tuple[int, int, int, int], weights: str, pool: RankPool
) -> None:
    assert unaccounted(pool.run(steps, 2, shape, weights, False)) <= UNACCOUNTED


@pytest.fixture
def one_core() -> Iterator[int]:
    """This process has a single core, which is named."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, cores)


def compute(thread_s: float = 0.2) -> None:
    """However long it takes to have so much of a core."""
    end_s = time.thread_time() + thread_s
    while time.thread_time() < end_s:
        pass


def busy_in(work: Callable[[], object]) -> tuple[float, float]:
    """The seconds for which this thread had work, and those that passed."""
    start_s, busy_before_s = moment()
    work()
    end_s, busy_after_s = moment()
    return busy_after_s - busy_before_s, end_s - start_s


@pytest.mark.nightly
def test_a_thread_is_busy_while_it_computes_not_while_it_sleeps() -> None:
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            sleeps = thread.submit(busy_in, lambda: time.sleep(0.3))
            compute()  # what this thread does is not what the other does
            slept_s, lay_s = sleeps.result()
            computed_s, took_s = thread.submit(busy_in, compute).result()
        assert (
            slept_s < lay_s - 0.29
        )  # it woke up and may have waited for a core; of its sleep nothing counts
        assert 0.2 <= computed_s <= 1.02 * took_s


@pytest.mark.nightly
def test_a_thread_that_waits_for_a_core_is_busy(one_core: int) -> None:
    other = "import sys\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE) as rival:
        assert rival.stdout is not None
        rival.stdout.readline()  # it is on the same core, and needs all of it
        with ThreadPoolExecutor(1) as thread:
            busy_s, took_s = thread.submit(busy_in, compute).result()
        rival.kill()
    assert 0.3 < busy_s <= 1.02 * took_s  # 0.2 of them on the core


def test_a_forked_process_reads_its_own_account() -> None:
    moment()
    child = os.fork()
    if child == 0:
        moment()
        opened = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
        os._exit(0 if f"/proc/{os.getpid()}/task/{os.getpid()}/schedstat" in opened else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.nightly
def test_a_forgotten_wait_shows(pool: RankPool) -> None:
    waiting, _ = pool.run(steps, 2, (1, 1, 1, 2), "streamed", True)
    assert unaccounted([waiting]) > UNACCOUNTED


def wait_for_a_slow_rank(axis: Any) -> tuple[float, float, float]:
    grid = Grid.create((1, 2, 1, 2))
    with ff.measure_step(grid) as report:
        pending = grid.collectives.all_reduce(torch.ones(8), axis, "activation")
        if grid.coordinate(axis) == 1:
            time.sleep(1.0)  # not computing, and not waiting for anybody
            grid.collectives.all_reduce(torch.ones(8), axis, "activation").wait()
        else:
            grid.collectives.all_reduce(torch.ones(8), axis, "activation").wait()
        pending.wait()
    return report.exposed_s(axis), report.exposed_s(), report.other_s


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["z", "x"])
def test_seconds_land_on_the_axis(axis: str, pool: RankPool) -> None:
    for rank, (on_axis, everywhere, other) in enumerate(pool.run(wait_for_a_slow_rank, 4, axis)):
        slow = (rank // 2 if axis == "z" else rank % 2) == 1
        assert on_axis == everywhere
        # Half a second for what else the machine does: it is late for the wait, or wakes up late from it.
        assert (on_axis < 0.5) if slow else (0.5 < on_axis < 1.5)
        assert (0.99 < other < 1.5) if slow else (other < 0.5)
