"""Lightning's trainer on its own strategy, with a model on a grid, trains as in one process."""

from pathlib import Path

import pytest

from benchmarks import trainers
from benchmarks.ranks import RankPool


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (1, 1, 2, 2)])
def test_the_example_trains_as_in_one_process(shape: trainers.Shape, pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (stock,) = pool.run(trainers.alone, 1, trainers.LIGHTNING)
    found = pool.run(trainers.on_grid, 4, trainers.LIGHTNING, shape, str(tmp_path), None, False)[0]
    assert max(trainers.worst_error(found, stock)) <= trainers.BAR
