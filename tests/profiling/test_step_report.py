"""Compute time and exposed communication add up to the step, and waits are attributed to their axis."""

from typing import Any

import pytest
import torch

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold.mesh.grid import Grid
from tests.models import batch, build


class Ticks:
    """A clock that moves by one second with each mark."""

    immediate = True

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


def measure(axis: Any) -> tuple[float, float, float, float]:
    grid = Grid.create((1, 2, 1, 2))
    grid.collectives.clock = clock = Ticks()
    with ff.measure_step(grid) as report:
        pending = grid.collectives.all_reduce(torch.ones(8), axis, "activation")
        clock.now_s += 5.0  # computation
        pending.wait()
        pending.wait()  # the second wait returns at once
        grid.collectives.all_reduce(torch.ones(8), axis, "loss").wait()
    other = "x" if axis == "z" else "z"
    return report.step_s, report.compute_s, report.exposed_s(axis), report.exposed_s(other)


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["z", "x"])
def test_exposed_seconds_are_attributed_to_their_axis(axis: str, pool: RankPool) -> None:
    for step_s, compute_s, exposed_s, elsewhere_s in pool.run(measure, 4, axis):
        # Two marks around the step and two around each of the two waits; a wait takes one second.
        assert (step_s, exposed_s, elsewhere_s) == (10.0, 2.0, 0.0)
        assert compute_s == 8.0


def step_of_a_model(weights: str) -> tuple[float, float, bool]:
    grid = Grid.create((1, 2, 1, 2))
    grid.collectives.clock = Ticks()
    model = build("llama")
    ff.parallelize(model, grid, weights=weights)  # type: ignore[arg-type]
    ids, labels = (rows[grid.local_rows(4)] for rows in batch(4))
    with ff.measure_step(grid) as report:
        model(input_ids=ids, labels=labels).loss.backward()
    waits = sum(entry.exposed_s for entry in report.entries)
    return report.exposed_s(), waits, str(report).startswith("step ")


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_every_wait_of_a_step_is_counted(weights: str, pool: RankPool) -> None:
    for exposed_s, waits_s, is_shown in pool.run(step_of_a_model, 4, weights):
        assert exposed_s == waits_s > 0
        assert is_shown
