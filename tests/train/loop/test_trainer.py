"""The loop trains as stock PyTorch would, goes on where it stopped on any grid, and repeats itself bit for bit."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import RankPool
from fourfold.checkpoint import Checkpoints, retention
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.storage import Writer
from fourfold.config.schema import RunConfig
from fourfold.export import export
from fourfold.planner.inputs.layout import Layout
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.evaluate import Evaluation
from fourfold.train.observe.run_metadata import facts_of
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
    [
        ((1, 1, 1, 1), 2),
        ((1, 2, 2, 2), None),
        pytest.param((2, 1, 1, 2), 2, marks=pytest.mark.nightly),
        pytest.param((1, 4, 1, 1), 1, marks=pytest.mark.nightly),
        pytest.param((2, 1, 2, 1), None, marks=pytest.mark.nightly),
    ],
)
def test_a_grid_has_the_losses_of_stock_pytorch(
    pool: RankPool, values: dict[str, Any], shape: Shape, at_a_time: int | None
) -> None:
    run = on(values, shape, batch={"micro_batch_sequences": at_a_time})
    for losses, _ in pool.run(train, run.grid.size, run):
        close(losses, stock_losses(run), ACROSS)


class Validation(Evaluation):
    """The losses it found."""

    found: list[float]

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        super().on_step(trainer, result)
        self.found = [*getattr(self, "found", []), result.figures["validation_loss"]]


def train_by_tokens(run: RunConfig) -> tuple[dict[int, float], list[float], Any]:
    """(losses, validation losses, what the facts say of the layout)."""
    validation, facts = Validation(run.evaluation.sequences, 1), Facts()
    losses, _ = train(run, validation, facts, saves=True)
    return losses, validation.found, facts.layout


class Facts(Callback):
    layout: Any = None

    def on_start(self, trainer: Trainer) -> None:
        self.layout = Layout(**facts_of(trainer)["layout"])


def test_token_sharded_activations_train_evaluate_and_save_the_same(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path)
    found = {}
    for activations in ("replicated", "token-sharded"):
        engine = {"activations": activations, "keep_inputs": activations == "replicated"}
        folder = tmp_path / activations
        run = on(
            values, (1, 1, 2, 2), engine=engine, schedule={"steps": 3}, checkpoints={"folder": str(folder)}
        )
        (found[activations], *_) = pool.run(train_by_tokens, 4, run)
        assert "config.json" in export(folder, tmp_path / f"{activations}-out").files
    (expected, validation, before), (losses, again, layout) = found.values()
    assert (before.by_tokens, before.keep_inputs) == (False, True)
    assert (layout.by_tokens, layout.keep_inputs) == (True, False)
    close(losses, expected, ACROSS)
    close(dict(enumerate(again)), dict(enumerate(validation)), ACROSS)


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


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
def test_a_second_run_is_bit_equal(pool: RankPool, values: dict[str, Any], precision: str) -> None:
    run = on(values, (1, 2, 1, 2), engine={"precision": precision, "activation_checkpointing": "full"})
    assert all(pool.run(run_twice, 4, run))


@pytest.mark.parametrize(("kind", "rate"), [("llama", {}), ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1})])
def test_a_run_goes_on_where_it_stopped(
    pool: RankPool, tmp_path: Path, kind: str, rate: dict[str, float]
) -> None:
    """Asked to stop on one rank after step 2, it stops on all after step 3; then to the end."""
    values = write_run(tmp_path, kind, **rate)
    shape: Shape = (1, 2, 1, 2)
    ((whole, _), *_) = pool.run(train, 4, on(values, shape))
    first = pool.run(train, 4, on(values, shape), saves=True, stop_at=2)
    assert [sorted(losses) for losses, _ in first] == [[1, 2, 3]] * 4
    ((rest, _), *_) = pool.run(train, 4, on(values, shape), saves=True)
    close(first[0][0] | rest, whole, SAME)
    assert sorted(rest) == [4, 5, 6]


class WhatIsThere(Callback):
    """The newest checkpoint that is there at the end of each step."""

    def __init__(self) -> None:
        self.newest: list[int] = []

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.newest.append(max(retention.steps(open_folder(trainer.run.checkpoints.folder)), default=0))


def train_with_slow_writes(run: RunConfig) -> list[int]:
    """The newest checkpoint at the end of each step, where a write ends only when a step waits for it."""
    there, write, wait = WhatIsThere(), Writer.write_data, Checkpoints.wait
    is_waited_for = threading.Event()

    def slow(*args: Any) -> Any:
        assert is_waited_for.wait(300)
        return write(*args)

    def allow(checkpoints: Checkpoints) -> None:
        is_waited_for.set()
        try:
            wait(checkpoints)
        finally:
            is_waited_for.clear()

    with patch.object(Writer, "write_data", slow), patch.object(Checkpoints, "wait", allow):
        train(run, there, saves=True)
    return there.newest


@pytest.mark.parametrize(("within", "expected"), [(1, [0, 0, 2, 2, 4, 4]), (2, [0, 0, 0, 2, 2, 4])])
def test_steps_wait_for_a_checkpoint_that_is_long_in_writing(
    pool: RankPool, tmp_path: Path, within: int, expected: list[int]
) -> None:
    saving = {"every_steps": 2, "written_within_steps": within, "folder": str(tmp_path / "slow")}
    run = on(write_run(tmp_path), (1, 2, 1, 1), checkpoints=saving)
    assert pool.run(train_with_slow_writes, 2, run) == [expected] * 2


def evaluating(run: RunConfig, stop_at: int | None = None) -> dict[int, float]:
    return train(run, Evaluation(run.evaluation.sequences, 1), saves=True, stop_at=stop_at)[0]


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.nightly), "gpt2"])
def test_with_fsdp2_too(pool: RankPool, tmp_path: Path, kind: str) -> None:
    """After a forward alone, such as an evaluation's, FSDP2 holds some weights gathered: they are nobody's to train or save."""
    run = on(write_run(tmp_path, kind), (1, 2, 1, 2), engine={"weights": "fsdp2"})
    (first, *_) = pool.run(evaluating, 4, run, stop_at=2)
    (rest, *_) = pool.run(evaluating, 4, run)
    close(first | rest, stock_losses(run), ACROSS)


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


def test_a_folder_with_checkpoints_is_not_begun_anew(pool: RankPool, tmp_path: Path) -> None:
    """Refused before the first step: two runs in one folder would meet at a step that both save, and mix when resumed."""
    values = write_run(tmp_path)
    pool.run(train, 2, on(values, (1, 1, 1, 2)), saves=True, stop_at=1)
    anew = on(values, (1, 1, 1, 2), checkpoints={"resume": False})
    with pytest.raises(Exception, match=r"resume=false.*checkpoints has step-2.*another checkpoints\.folder"):
        pool.run(train, 2, anew, saves=True)
    elsewhere = on(values, (1, 1, 1, 2), checkpoints={"resume": False, "folder": str(tmp_path / "other")})
    ((losses, _), _) = pool.run(train, 2, elsewhere, saves=True)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]


class Options(Callback):
    """What the optimizer works with."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, tuple[float, float], float]] = []

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        group = trainer.optimizer.param_groups[0]
        self.seen.append((group["weight_decay"], group["betas"], group["eps"]))


def options_of(run: RunConfig, stop_at: int | None = None) -> list[tuple[float, tuple[float, float], float]]:
    options = Options()
    train(run, options, saves=True, stop_at=stop_at)
    return options.seen


def test_a_resumed_run_obeys_its_file(pool: RankPool, tmp_path: Path) -> None:
    """As with the rate: what the file says of the optimizer now, not what it said when the checkpoint was saved."""
    values = write_run(tmp_path)
    pool.run(options_of, 1, on(values, (1, 1, 1, 1)), stop_at=1)
    other = {"weight_decay": 0.5, "betas": [0.8, 0.99], "eps": 1e-3}
    (seen,) = pool.run(options_of, 1, on(values, (1, 1, 1, 1), optimizer=other))
    assert seen == [(0.5, (0.8, 0.99), 1e-3)] * 4


def evaluated(run: RunConfig) -> tuple[dict[int, float], float, bool]:
    """(losses, the validation loss, whether evaluation left no trace in training)."""
    evaluation = Evaluation(run.evaluation.sequences, 1)
    plain, _ = train(run)
    figures: list[float] = []

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
