"""The loop trains as stock PyTorch would, goes on where it stopped on any grid, and repeats itself bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import RankPool
from fourfold.train.config import RunConfig
from fourfold.train.evaluate import Evaluation
from tests.training import Shape, on, stock_losses, train, write_run

SAME, ACROSS = 1e-6, 1e-5  # relative; grids sum in different orders


def close(found: dict[int, float], expected: dict[int, float], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    worst = max(abs(found[step] - loss) / loss for step, loss in expected.items())
    assert worst <= tolerance, (worst, found, expected)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("shape", "at_a_time"),
    [((1, 1, 1, 1), 2), ((1, 2, 2, 2), None), ((2, 1, 1, 2), 2), ((1, 4, 1, 1), 1), ((2, 1, 2, 1), None)],
)
def test_a_grid_has_the_losses_of_stock_pytorch(
    pool: RankPool, values: dict[str, Any], shape: Shape, at_a_time: int | None
) -> None:
    run = on(values, shape, batch={"micro_batch_sequences": at_a_time})
    for losses, _ in pool.run(train, run.grid.size, run):
        close(losses, stock_losses(run), ACROSS)


def test_the_comparison_would_see_another_rate(pool: RankPool, values: dict[str, Any]) -> None:
    run = on(values, (1, 1, 1, 1))
    other = on(values, (1, 1, 1, 1), schedule={"warmup_steps": 1})
    ((losses, _),) = pool.run(train, 1, other)
    with pytest.raises(AssertionError):
        close(losses, stock_losses(run), ACROSS)


def run_twice(run: RunConfig) -> bool:
    (first, weights), (second, again) = train(run), train(run)
    return first == second and all(
        torch.equal(_local(weights[name]), _local(again[name])) for name in weights
    )


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_second_run_is_bit_equal(pool: RankPool, values: dict[str, Any], precision: str) -> None:
    run = on(values, (1, 2, 1, 2), engine={"precision": precision, "activation_checkpointing": "full"})
    assert all(pool.run(run_twice, 4, run))


@pytest.mark.parametrize(("kind", "rate"), [("llama", {}), ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1})])
def test_a_run_goes_on_where_it_stopped(
    pool: RankPool, tmp_path: Path, kind: str, rate: dict[str, float]
) -> None:
    """Asked to stop on one rank after step 2, it stops on all after step 3; then to the end, once on another grid."""
    values = write_run(tmp_path, kind, **rate)
    shape: Shape = (1, 2, 1, 2)
    ((whole, _), *_) = pool.run(train, 4, on(values, shape))
    first = pool.run(train, 4, on(values, shape), saves=True, stop_at=2)
    assert [sorted(losses) for losses, _ in first] == [[1, 2, 3]] * 4
    ((rest, _), *_) = pool.run(train, 4, on(values, shape), saves=True)
    close(first[0][0] | rest, whole, SAME)
    assert sorted(rest) == [4, 5, 6]


def test_muon_trains_and_goes_on(pool: RankPool, tmp_path: Path) -> None:
    """On one grid: Newton-Schulz in bf16 lets grids drift apart, as much as noise in the gradients does in one process."""
    values = write_run(tmp_path) | {"optimizer": {"name": "muon", "lr": 1e-2}}
    run = on(values, (1, 2, 1, 2))
    ((whole, _), *_) = pool.run(train, 4, run)
    ((first, _), *_) = pool.run(train, 4, run, saves=True, stop_at=2)
    ((rest, _), *_) = pool.run(train, 4, run, saves=True)
    close(first | rest, whole, SAME)
    ((with_adamw, _), *_) = pool.run(train, 4, on(values | {"optimizer": {"lr": 1e-2}}, (1, 2, 1, 2)))
    assert with_adamw != whole


def test_a_run_goes_on_on_other_grids(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path)
    ((whole, _),) = pool.run(train, 1, on(values, (1, 1, 1, 1)))
    found: dict[int, float] = {}
    for shape, stop_at in (((1, 2, 2, 2), 1), ((2, 1, 1, 2), 3), ((1, 1, 1, 1), None)):
        run = on(values, shape, batch={"micro_batch_sequences": 2})
        ((losses, _), *_) = pool.run(train, run.grid.size, run, saves=True, stop_at=stop_at)
        assert not found.keys() & losses.keys()
        found |= losses
    close(found, whole, ACROSS)


def test_other_data_is_refused_in_the_middle_of_a_run(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path)
    pool.run(train, 1, on(values, (1, 1, 1, 1)), saves=True, stop_at=1)
    with pytest.raises(Exception, match="trained on data with seed=3, this run has seed=4"):
        pool.run(train, 1, on(values | {"seed": 4}, (1, 1, 1, 1)), saves=True)


def evaluated(run: RunConfig) -> tuple[dict[int, float], float, bool]:
    """(losses, the validation loss, whether evaluation left no trace in training)."""
    evaluation = Evaluation(run.evaluation.sequences, 1)
    plain, _ = train(run)
    figures: list[float] = []
    from tests.training import Callback, StepResult, Trainer

    class Keep(Callback):
        def on_step(self, trainer: Trainer, result: StepResult) -> None:
            figures.append(result.figures["validation_loss"])

    losses, _ = train(run, evaluation, Keep())
    return losses, figures[-1], losses == plain


def test_evaluation_is_the_same_on_every_grid_and_leaves_no_trace(
    pool: RankPool, values: dict[str, Any]
) -> None:
    found = {}
    for shape in ((1, 1, 1, 1), (1, 2, 1, 2)):
        run = on(values, shape, batch={"micro_batch_sequences": 2}, evaluation={"sequences": 12})
        ((losses, validation, is_equal), *_) = pool.run(evaluated, run.grid.size, run)
        assert is_equal
        found[shape] = validation
        assert validation != losses[max(losses)]
    assert abs(found[1, 2, 1, 2] - found[1, 1, 1, 1]) <= ACROSS * found[1, 1, 1, 1]
