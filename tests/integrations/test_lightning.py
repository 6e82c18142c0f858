"""Lightning's trainer and Fabric on their own strategy, with a model on a grid, train as in one process."""

from pathlib import Path

import pytest

from benchmarks.ranks import RankPool
from benchmarks.trainers import runs
from benchmarks.trainers.outcome import BAR, Shape, worst_error


@pytest.mark.nightly
@pytest.mark.parametrize("name", runs.LOOPS)
@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (1, 1, 2, 2)])
def test_the_example_trains_as_in_one_process(
    name: str, shape: Shape, pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    (stock,) = pool.run(runs.alone, 1, name)
    found = pool.run(runs.on_grid, 4, name, shape, str(tmp_path), None, False)[0]
    assert max(worst_error(found, stock)) <= BAR
