"""The loop trains as stock PyTorch does, resumes on any grid, and is reproducible bit for bit."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import RankPool
from fourfold.checkpoint import Checkpoints, commit
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.storage import Writer
from fourfold.config.schema import RunConfig
from fourfold.export import export
from fourfold.parallel import compiled
from fourfold.planner.inputs.layout import Layout
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.evaluate import Evaluation
from fourfold.train.observe.run_metadata import run_metadata
from tests.training import Shape, on, stock_losses, train, write_run

SAME, ACROSS = 1e-6, 1e-5  # relative tolerances; grids sum in different orders


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
def test_losses_on_a_grid_equal_those_of_stock_pytorch(
    pool: RankPool, values: dict[str, Any], shape: Shape, at_a_time: int | None
) -> None:
    run = on(values, shape, batch={"micro_batch_sequences": at_a_time})
    for losses, _ in pool.run(train, run.grid.size, run):
        close(losses, stock_losses(run), ACROSS)


def train_compiled(run: RunConfig) -> tuple[dict[int, float], dict[int, float], int]:
    """The losses of blocks as they are and compiled, and the graphs."""
    compiled.BACKEND = "aot_eager"
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    weights = {"weights": "fsdp2"}  # which adds in the same order
    expected, _ = train(run.model_copy(update={"engine": run.engine.model_copy(update=weights)}))
    graph = run.engine.model_copy(update={"compile": True})
    losses, _ = train(run.model_copy(update={"engine": graph}))
    return expected, losses, counters["stats"]["unique_graphs"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "recomputed"),
    [((1, 2, 1, 1), "none"), ((1, 1, 1, 2), "selective")],
)
def test_a_run_with_compiled_blocks_has_the_same_losses(
    pool: RankPool, values: dict[str, Any], shape: Shape, recomputed: str
) -> None:
    """Of packed documents, in two micro-batches: one graph with their mask, and one for rows of a single document."""
    engine = {"activation_checkpointing": recomputed, "accumulation": "whole", "attention": "masked"}
    run = on(values, shape, engine=engine, batch={"micro_batch_sequences": 2})
    for expected, losses, graphs in pool.run(train_compiled, 2, run):
        assert losses == expected
        assert graphs == 2


class Validation(Evaluation):
    """Keeps the validation losses."""

    found: list[float]

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        super().on_step(trainer, result)
        self.found = [*getattr(self, "found", []), result.metrics["validation_loss"]]


def train_by_tokens(run: RunConfig) -> tuple[dict[int, float], list[float], Any]:
    """(losses, validation losses, the layout in the metadata of the run)."""
    validation, metadata = Validation(run.evaluation.sequences, 1), RunLayout()
    losses, _ = train(run, validation, metadata, saves=True)
    return losses, validation.found, metadata.layout


class RunLayout(Callback):
    layout: Any = None

    def on_start(self, trainer: Trainer) -> None:
        self.layout = Layout(**run_metadata(trainer)["layout"])


@pytest.mark.nightly
def test_sequence_parallel_activations_train_evaluate_and_save_alike(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path)
    found = {}
    for activations in ("replicated", "sequence-parallel"):
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


def test_the_comparison_would_detect_another_learning_rate(pool: RankPool, values: dict[str, Any]) -> None:
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


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_second_run_is_bit_identical(pool: RankPool, values: dict[str, Any], precision: str) -> None:
    run = on(values, (1, 2, 1, 2), engine={"precision": precision, "activation_checkpointing": "full"})
    assert all(pool.run(run_twice, 4, run))


@pytest.mark.parametrize(
    ("kind", "dropout"),
    [
        pytest.param("llama", {}, marks=pytest.mark.nightly),
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1}),
    ],
)
def test_a_stopped_run_resumes(pool: RankPool, tmp_path: Path, kind: str, dropout: dict[str, float]) -> None:
    """A stop requested on one rank after step 2 stops all ranks after step 3; then the run resumes to its end."""
    values = write_run(tmp_path, kind, **dropout)
    shape: Shape = (1, 2, 1, 2)
    ((uninterrupted, _), *_) = pool.run(train, 4, on(values, shape))
    first = pool.run(train, 4, on(values, shape), saves=True, stop_at=2)
    assert [sorted(losses) for losses, _ in first] == [[1, 2, 3]] * 4
    ((rest, _), *_) = pool.run(train, 4, on(values, shape), saves=True)
    close(first[0][0] | rest, uninterrupted, SAME)
    assert sorted(rest) == [4, 5, 6]


class NewestCheckpoint(Callback):
    """The newest checkpoint at the end of each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.steps.append(max(commit.steps(open_folder(trainer.run.checkpoints.folder)), default=0))


def train_with_slow_writes(run: RunConfig) -> list[int]:
    """The newest checkpoint at the end of each step, where a write ends only when a step waits for it."""
    newest, write, wait = NewestCheckpoint(), Writer.write_data, Checkpoints.wait
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
        train(run, newest, saves=True)
    return newest.steps


@pytest.mark.parametrize(("within", "expected"), [(1, [0, 0, 2, 2, 4, 4]), (2, [0, 0, 0, 2, 2, 4])])
def test_steps_wait_for_a_slow_checkpoint(
    pool: RankPool, tmp_path: Path, within: int, expected: list[int]
) -> None:
    saving = {"every_steps": 2, "max_async_lag_steps": within, "folder": str(tmp_path / "slow")}
    run = on(write_run(tmp_path), (1, 2, 1, 1), checkpoints=saving)
    assert pool.run(train_with_slow_writes, 2, run) == [expected] * 2


def evaluating(run: RunConfig, stop_at: int | None = None) -> dict[int, float]:
    return train(run, Evaluation(run.evaluation.sequences, 1), saves=True, stop_at=stop_at)[0]


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.nightly), "gpt2"])
def test_fsdp2_weights_train_evaluate_and_resume(pool: RankPool, tmp_path: Path, kind: str) -> None:
    """After a forward without backward, as in an evaluation, FSDP2 keeps some weights gathered; they must not be saved."""
    run = on(write_run(tmp_path, kind), (1, 2, 1, 2), engine={"weights": "fsdp2"})
    (first, *_) = pool.run(evaluating, 4, run, stop_at=2)
    (rest, *_) = pool.run(evaluating, 4, run)
    close(first | rest, stock_losses(run), ACROSS)


@pytest.mark.nightly
def test_muon_trains_and_resumes(pool: RankPool, tmp_path: Path) -> None:
    """On one grid: Newton-Schulz in bf16 lets grids drift apart, as much as noise in the gradients does in one process."""
    values = write_run(tmp_path) | {"optimizer": {"name": "muon", "lr": 1e-2}}
    run = on(values, (1, 2, 1, 2))
    ((uninterrupted, _), *_) = pool.run(train, 4, run)
    ((first, _), *_) = pool.run(train, 4, run, saves=True, stop_at=2)
    ((rest, _), *_) = pool.run(train, 4, run, saves=True)
    close(first | rest, uninterrupted, SAME)
    ((with_adamw, _), *_) = pool.run(train, 4, on(values | {"optimizer": {"lr": 1e-2}}, (1, 2, 1, 2)))
    assert with_adamw != uninterrupted


def test_a_run_resumes_on_other_grids(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path)
    ((uninterrupted, _),) = pool.run(train, 1, on(values, (1, 1, 1, 1)))
    found: dict[int, float] = {}
    for shape, stop_at in (((1, 2, 2, 2), 1), ((2, 1, 1, 2), 3), ((1, 1, 1, 1), None)):
        run = on(values, shape, batch={"micro_batch_sequences": 2})
        ((losses, _), *_) = pool.run(train, run.grid.size, run, saves=True, stop_at=stop_at)
        assert not found.keys() & losses.keys()
        found |= losses
    close(found, uninterrupted, ACROSS)


def test_a_resumed_run_rejects_other_data(pool: RankPool, tmp_path: Path) -> None:
    values = write_run(tmp_path)
    pool.run(train, 1, on(values, (1, 1, 1, 1)), saves=True, stop_at=1)
    with pytest.raises(Exception, match="trained on data with seed=3, this run has seed=4"):
        pool.run(train, 1, on(values | {"seed": 4}, (1, 1, 1, 1)), saves=True)


def test_a_new_run_rejects_a_folder_with_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    """Rejected before the first step: checkpoints of two runs in one folder would mix when resumed."""
    values = write_run(tmp_path)
    pool.run(train, 2, on(values, (1, 1, 1, 2)), saves=True, stop_at=1)
    anew = on(values, (1, 1, 1, 2), checkpoints={"resume": False})
    with pytest.raises(Exception, match=r"resume=false.*checkpoints has step-2.*another checkpoints\.folder"):
        pool.run(train, 2, anew, saves=True)
    elsewhere = on(values, (1, 1, 1, 2), checkpoints={"resume": False, "folder": str(tmp_path / "other")})
    ((losses, _), _) = pool.run(train, 2, elsewhere, saves=True)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]


class Options(Callback):
    """The options of the optimizer."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, tuple[float, float], float]] = []

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        group = trainer.optimizer.param_groups[0]
        self.seen.append((group["weight_decay"], group["betas"], group["eps"]))


def options_of(run: RunConfig, stop_at: int | None = None) -> list[tuple[float, tuple[float, float], float]]:
    options = Options()
    train(run, options, saves=True, stop_at=stop_at)
    return options.seen


def test_a_resumed_run_uses_its_own_config(pool: RankPool, tmp_path: Path) -> None:
    """Options of the optimizer, as the learning rate, are those of the run config, not of the checkpoint."""
    values = write_run(tmp_path)
    pool.run(options_of, 1, on(values, (1, 1, 1, 1)), stop_at=1)
    other = {"weight_decay": 0.5, "betas": [0.8, 0.99], "eps": 1e-3}
    (seen,) = pool.run(options_of, 1, on(values, (1, 1, 1, 1), optimizer=other))
    assert seen == [(0.5, (0.8, 0.99), 1e-3)] * 4


def evaluated(run: RunConfig) -> tuple[dict[int, float], float, bool]:
    """(losses, the validation loss, whether training is the same without evaluation)."""
    evaluation = Evaluation(run.evaluation.sequences, 1)
    plain, _ = train(run)
    found: list[float] = []

    class Keep(Callback):
        def on_step(self, trainer: Trainer, result: StepResult) -> None:
            found.append(result.metrics["validation_loss"])

    losses, _ = train(run, evaluation, Keep())
    return losses, found[-1], losses == plain


@pytest.mark.parametrize(
    "sequences", [pytest.param(11, marks=pytest.mark.nightly), 1]
)  # two ranks read 6 and 5 of them, or 1 and none
def test_evaluation_is_the_same_on_every_grid_and_does_not_change_training(
    pool: RankPool, values: dict[str, Any], sequences: int
) -> None:
    found = {}
    for shape in ((1, 1, 1, 1), (1, 2, 1, 2)):
        run = on(values, shape, batch={"micro_batch_sequences": 2}, evaluation={"sequences": sequences})
        ((losses, validation, is_equal), *_) = pool.run(evaluated, run.grid.size, run)
        assert is_equal
        found[shape] = validation
        assert validation != losses[max(losses)]
    assert abs(found[1, 2, 1, 2] - found[1, 1, 1, 1]) <= ACROSS * found[1, 1, 1, 1]
