"""Bad steps are skipped on all ranks alike, runs roll back, a differing replica and a slow rank are named."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import RankError, RankPool
from fourfold.checkpoint import Checkpoints, commit
from fourfold.checkpoint.folder import open_folder
from fourfold.drill.fault import Fault
from fourfold.drill.injector import Injector, flip_weight
from fourfold.mesh.grid import Grid
from fourfold.train.loop.optimizers import update
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.resilience.bad_steps import AT_LEAST, BadSteps, SpikeDetector
from fourfold.train.resilience.replica_check import ReplicaConsistencyCheck, minority
from fourfold.train.resilience.stragglers import Stragglers
from tests.training import LENGTH, on, write_run
from tests.training import train as train_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_run(tmp_path_factory.mktemp("run"))


class Weights(Callback):
    """Weights and optimizer state of this rank after each step."""

    def __init__(self) -> None:
        self.after: dict[int, list[Tensor]] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        state = trainer.optimizer.state
        pairs: Any = trainer.optimizer._pairs  # type: ignore[attr-defined]
        states = [state[shard][kind] for _, shard in pairs for kind in sorted(state[shard])]
        shards = [p.to_local() for p in trainer.model.parameters()]  # type: ignore[attr-defined]
        self.after[result.step] = [t.detach().clone() for t in (*shards, *states)]
        self.metrics[result.step] = dict(result.metrics)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(
    values: dict[str, Any],
    shape: Any,
    faults: Sequence[Fault],
    *callbacks: Callback,
    steps: int = 8,
    folder: str | None = None,
    batch: int = 8,
) -> tuple[Weights, Trainer]:
    run = on(
        values,
        shape,
        schedule={"steps": steps, "kind": "constant"},
        batch={"tokens": batch * LENGTH},
        evaluation={"sequences": batch},
        checkpoints={"folder": folder or "none"},
    )
    seen = Weights()
    trainer = Trainer(run, Grid.create(shape), [Injector(faults), *callbacks, seen])
    if folder is None:
        trainer.train()
    else:
        with Checkpoints(folder) as checkpoints:
            trainer.train(checkpoints)
    return seen, trainer


# -- a skipped step ----------------------------------------------------------------------------------------------


def skip(values: dict[str, Any], shape: Any, action: Any, step: int) -> tuple[bool, bool, float]:
    fault = Fault(action, "gradients", rank=1, step=step, seed=5)
    # Each rank has the fault: a spike in one rank's gradient reaches all of them with the sum.
    faults = [fault] if action == "nan" else [Fault(action, "gradients", rank=r, step=step) for r in range(4)]
    seen, _ = train(values, shape, faults, BadSteps(6.0, 5), steps=step + 1)
    stays = same(seen.after[step], seen.after[step - 1])
    continues = not same(seen.after[step + 1], seen.after[step]) and all(
        bool(torch.isfinite(t).all()) for t in seen.after[step + 1]
    )
    return stays, continues, seen.metrics[step + 1].get("skipped_steps", -1.0)


@pytest.mark.parametrize(
    ("shape", "action", "step"),
    [
        ((1, 2, 1, 2), "nan", 3),
        ((2, 1, 1, 2), "nan", 3),
        pytest.param((1, 2, 1, 2), "spike", AT_LEAST + 2, marks=pytest.mark.nightly),
    ],
)
def test_a_bad_step_leaves_weights_and_optimizer_unchanged_on_all_ranks(
    pool: RankPool, values: dict[str, Any], shape: Any, action: str, step: int
) -> None:
    found = pool.run(skip, 4, values, shape, action, step)
    assert [(stays, continues) for stays, continues, _ in found] == [(True, True)] * 4
    assert found[0][2] == 1.0


def train_with_nan(values: dict[str, Any]) -> bool:
    seen, _ = train(values, (1, 2, 1, 1), [Fault("nan", "gradients", rank=1, step=3)], steps=4)
    return all(bool(torch.isfinite(t).all()) for t in seen.after[4])


def test_without_the_callback_the_same_fault_corrupts_the_weights(
    pool: RankPool, values: dict[str, Any]
) -> None:
    assert pool.run(train_with_nan, 2, values) == [False, False]


def test_no_false_alarm_in_clean_steps_and_every_spike_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    for noise in (0.02, 0.2, 0.5):
        detector, alarms, found = SpikeDetector(6.0, math.log(2.0), CPU), 0, 0
        for step in range(1000):
            # A norm that falls from 5 to 1, with skewed noise as norms have.
            clean = (1 + 4 / (1 + step / 30)) * torch.exp(noise * torch.randn((), generator=generator))
            if step % 100 == 99:
                found += bool(detector.is_bad(clean * 1000))
            bad = detector.is_bad(clean)
            alarms += bool(bad)
            detector.add(clean, ~bad)
        assert alarms == 0, noise
        assert found == 10, noise


def test_a_fused_optimizer_reads_the_flag_itself() -> None:
    """As on CUDA, where the host must not wait for it."""

    class Unread(Tensor):
        def __bool__(self) -> bool:
            raise AssertionError("the host read the flag")

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    steps = []
    for skips in (False, True, False):
        weight.grad = torch.full((3,), torch.nan if skips else 1.0)
        before = weight.detach().clone()
        update(optimizer, [torch.tensor(skips).as_subclass(Unread)])
        assert torch.equal(weight.detach(), before) == skips
        steps.append(float(optimizer.state[weight]["step"]))
    assert steps == [1.0, 1.0, 2.0]


# -- rollback ----------------------------------------------------------------------------------------------------------


def roll_back(values: dict[str, Any], folder: str) -> tuple[bool, int, list[str]]:
    plain, _ = train(values, (1, 2, 1, 1), [], BadSteps(6.0, 2), folder=f"{folder}/plain")
    faults = [Fault("nan", "gradients", rank=r, step=s, seed=1) for r in (0, 1) for s in (6, 7)]
    seen, trainer = train(values, (1, 2, 1, 1), faults, BadSteps(6.0, 2), folder=f"{folder}/back")
    names = sorted(path.name for path in Path(folder, "back").iterdir())
    return same(plain.after[8], seen.after[8]), trainer.rollbacks.count, names


@pytest.mark.nightly
def test_random_bad_steps_in_a_row_are_rolled_back_and_the_run_ends_as_without_them(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    for is_same, rollbacks, names in pool.run(roll_back, 2, values, str(tmp_path)):
        assert is_same
        assert rollbacks == 1
        # The checkpoint of step 6 was saved between the bad steps.
        assert names == ["step-2", "step-4", "step-6", "step-6.undone-0", "step-8"]


class BadData(Callback):
    """Some samples always give NaN."""

    def __init__(self, samples: range) -> None:
        self._samples, self.skipped_to = samples, 0

    def on_gradients(self, trainer: Trainer) -> None:
        if trainer.training.data["samples"] in self._samples:
            for parameter in trainer.model.parameters():
                assert parameter.grad is not None
                parameter.grad.to_local().fill_(torch.nan)  # type: ignore[attr-defined]

    def on_rollback(self, trainer: Trainer) -> None:
        self.skipped_to = int(trainer.training.data["samples"])


def train_on_bad_data(values: dict[str, Any], folder: str, bad: range) -> tuple[int, int, int]:
    data = BadData(bad)
    _, trainer = train(values, (1, 2, 1, 1), [], data, BadSteps(6.0, 2), folder=folder)
    return trainer.rollbacks.count, data.skipped_to, trainer.step


def test_samples_that_give_nan_twice_are_skipped(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    # Steps 5 and 6 have the samples 32 to 47.
    assert pool.run(train_on_bad_data, 2, values, str(tmp_path), range(32, 48)) == [(2, 48, 8)] * 2


def test_a_run_that_does_not_recover_ends_with_an_error(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"also after two rollbacks .*; look at the data"):
        pool.run(train_on_bad_data, 2, values, str(tmp_path), range(32, 10**6))


def resume_detectors(values: dict[str, Any], folder: str) -> tuple[bool, float]:
    train(values, (1, 2, 1, 1), [Fault("nan", "gradients", step=3)], BadSteps(6.0, 5), folder=folder, steps=4)
    first, again = BadSteps(6.0, 5), BadSteps(6.0, 5)
    train(values, (1, 2, 1, 1), [Fault("nan", "gradients", step=3)], first, steps=6)
    seen, _ = train(values, (1, 2, 1, 1), [], again, folder=folder, steps=6)
    alike = [
        torch.equal(first._detectors[n].values.nan_to_num(), again._detectors[n].values.nan_to_num())
        for n in first._detectors
    ]
    return all(alike), seen.metrics[6].get("skipped_steps", -1.0)


def test_a_checkpoint_keeps_the_values_of_the_spike_detectors(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    found = pool.run(resume_detectors, 2, values, str(tmp_path))
    assert [alike for alike, _ in found] == [True, True]
    assert found[0][1] == 1.0


# -- replicas ----------------------------------------------------------------------------------------------------------


def corrupt(values: dict[str, Any], folder: str) -> tuple[bool, int, str]:
    plain, _ = train(values, (3, 1, 1, 1), [], ReplicaConsistencyCheck(5), folder=f"{folder}/plain", batch=12)
    fault = Fault("flip", "step", rank=1, step=7, seed=3)
    with redirect_stderr(StringIO()) as stderr:
        seen, trainer = train(
            values, (3, 1, 1, 1), [fault], ReplicaConsistencyCheck(5), folder=f"{folder}/flip", batch=12
        )
    return same(plain.after[8], seen.after[8]), trainer.rollbacks.count, stderr.getvalue()


def test_a_flipped_bit_in_a_replica_is_named_rolled_back_and_not_saved(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    # Found before the save of step 8; the last checkpoint on which replicas agreed is that of step 6.
    found = pool.run(corrupt, 3, values, str(tmp_path))
    assert [(is_same, rollbacks) for is_same, rollbacks, _ in found] == [(True, 1)] * 3
    assert "step 8: the weights of rank 1 differ from those of the replicas" in found[0][2]
    assert not list(tmp_path.glob("flip/*undone*"))


def corrupt_and_stop(values: dict[str, Any], folder: str) -> tuple[str, list[int]]:
    """A stop requested after step 4 saves after step 5, in which a bit flips; no interval ends there."""
    run = on(
        values, (1, 1, 1, 1), checkpoints={"folder": folder, "every_steps": 2}, batch={"tokens": 12 * LENGTH}
    )
    run = run.model_copy(update={"grid": run.grid.model_copy(update={"data": 3})})
    fault = Fault("flip", "step", rank=1, step=5, seed=3)
    with redirect_stderr(StringIO()) as stderr:
        train_run(run, Injector([fault]), ReplicaConsistencyCheck(100), saves=True, stop_at=4)
    return stderr.getvalue(), commit.steps(open_folder(folder))


def test_a_flipped_bit_is_not_saved_at_a_requested_stop(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    for rank, (said, steps) in enumerate(pool.run(corrupt_and_stop, 3, values, str(tmp_path))):
        assert steps == [2, 4]
        assert rank or "step 5: the weights of rank 1 differ from those of the replicas" in said


def flip_on_each_rank(values: dict[str, Any]) -> list[tuple[int, int]]:
    """Each rank in turn; on (2,1,1,2) two replicas of two ranks each."""
    run = on(values, (2, 1, 1, 2))
    trainer = Trainer(run, Grid.create((2, 1, 1, 2)))
    check = ReplicaConsistencyCheck(1)
    found = [check._differing_ranks(trainer)]
    for rank in range(4):
        if torch.distributed.get_rank() == rank:
            flip_weight(list(trainer.model.parameters()), random.Random(rank))
        found.append(check._differing_ranks(trainer))
        if torch.distributed.get_rank() == rank:
            flip_weight(list(trainer.model.parameters()), random.Random(rank))
    return found


def test_with_two_replicas_both_are_named_on_all_ranks(pool: RankPool, values: dict[str, Any]) -> None:
    for none, *differing in pool.run(flip_on_each_rank, 4, values):
        assert none[1] == -1
        assert differing == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_majorities() -> None:
    assert minority([1, 1, 1, 1]) == []
    assert minority([1, 2, 1, 3]) == [0, 1, 2, 3]
    assert minority([1, 2, 1, 1, 3]) == [1, 4]


# -- a slow rank -------------------------------------------------------------------------------------------------------


class GivenSeconds(Stragglers):
    """Steps of given times: 2 s on rank 2 and 1 s elsewhere, without waits."""

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        self._is_measured = True
        yield
        self._waits_s.append(0.0)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        own_s = 2.0 if torch.distributed.get_rank() == 2 else 1.0
        super().on_step(trainer, replace(result, start=0.0, end=own_s))


def train_for_given_seconds(values: dict[str, Any], factor: float) -> dict[int, float]:
    stragglers = GivenSeconds(3, factor)
    train(values, (1, 2, 1, 2), [], stragglers, steps=10)
    return stragglers.named


@pytest.mark.parametrize(
    ("factor", "named"), [(1.5, {2: 2.0}), pytest.param(2.5, {}, marks=pytest.mark.nightly)]
)
def test_a_rank_that_is_slow_by_the_factor_is_named_by_all(
    pool: RankPool, values: dict[str, Any], factor: float, named: dict[int, float]
) -> None:
    assert pool.run(train_for_given_seconds, 4, values, factor) == [named] * 4


def slow_down(values: dict[str, Any], seconds: float) -> dict[int, float]:
    stragglers = Stragglers(3, 1.5)
    fault = Fault("slow", "step", rank=2, step=1, seconds=seconds, steps=20)
    train(values, (1, 2, 1, 2), [fault], stragglers, steps=10)
    return stragglers.named


@pytest.mark.nightly
def test_a_slow_rank_is_named_by_all(pool: RankPool, values: dict[str, Any]) -> None:
    for named in pool.run(slow_down, 4, values, 0.5):
        assert list(named) == [2]
        assert named[2] > 1.5
