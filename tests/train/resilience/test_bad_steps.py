"""Numbers that go bad: steps are left out on all ranks alike, runs go back, a wrong replica and a slow rank are named."""

import math
import random
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import RankError, RankPool
from fourfold.checkpoint import Checkpoints, retention
from fourfold.checkpoint.folder import open_folder
from fourfold.drill.fault import Fault
from fourfold.drill.injector import Injector, flip_weight
from fourfold.mesh.grid import Grid
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.loop.update import update
from fourfold.train.resilience import stragglers
from fourfold.train.resilience.bad_steps import AT_LEAST, BadSteps, Usual
from fourfold.train.resilience.replica_check import ReplicaConsistencyCheck, odd_ones
from fourfold.train.resilience.stragglers import Stragglers
from tests.training import LENGTH, on, write_run
from tests.training import train as train_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_run(tmp_path_factory.mktemp("run"))


class Weights(Callback):
    """All numbers of this rank after each step."""

    def __init__(self) -> None:
        self.after: dict[int, list[Tensor]] = {}
        self.figures: dict[int, dict[str, float]] = {}

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        state = trainer.optimizer.state
        pairs: Any = trainer.optimizer._pairs  # type: ignore[attr-defined]
        states = [state[shard][kind] for _, shard in pairs for kind in sorted(state[shard])]
        shards = [p.to_local() for p in trainer.model.parameters()]  # type: ignore[attr-defined]
        self.after[result.step] = [t.detach().clone() for t in (*shards, *states)]
        self.figures[result.step] = dict(result.figures)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(
    values: dict[str, Any],
    shape: Any,
    faults: Sequence[Fault],
    *watchers: Callback,
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
    trainer = Trainer(run, Grid.create(shape), [Injector(faults), *watchers, seen])
    if folder is None:
        trainer.train()
    else:
        with Checkpoints(folder) as checkpoints:
            trainer.train(checkpoints)
    return seen, trainer


# -- a step that is left out -------------------------------------------------------------------------------------------


def leave_out(values: dict[str, Any], shape: Any, action: Any, step: int) -> tuple[bool, bool, float]:
    fault = Fault(action, "gradients", rank=1, step=step, seed=5)
    # As a spike of one rank's gradient before it is summed would reach all: each rank has the fault.
    faults = [fault] if action == "nan" else [Fault(action, "gradients", rank=r, step=step) for r in range(4)]
    seen, _ = train(values, shape, faults, BadSteps(6.0, 5), steps=step + 1)
    stays = same(seen.after[step], seen.after[step - 1])
    goes_on = not same(seen.after[step + 1], seen.after[step]) and all(
        bool(torch.isfinite(t).all()) for t in seen.after[step + 1]
    )
    return stays, goes_on, seen.figures[step + 1].get("skipped_steps", -1.0)


@pytest.mark.parametrize(
    ("shape", "action", "step"),
    [((1, 2, 1, 2), "nan", 3), ((2, 1, 1, 2), "nan", 3), ((1, 2, 1, 2), "spike", AT_LEAST + 2)],
)
def test_a_bad_step_leaves_weights_and_optimizer_as_they_are_on_all_ranks(
    pool: RankPool, values: dict[str, Any], shape: Any, action: str, step: int
) -> None:
    found = pool.run(leave_out, 4, values, shape, action, step)
    assert [(stays, goes_on) for stays, goes_on, _ in found] == [(True, True)] * 4
    assert found[0][2] == 1.0


def spoil_unwatched(values: dict[str, Any]) -> bool:
    seen, _ = train(values, (1, 2, 1, 1), [Fault("nan", "gradients", rank=1, step=3)], steps=4)
    return all(bool(torch.isfinite(t).all()) for t in seen.after[4])


def test_without_the_watcher_the_same_fault_spoils_the_weights(
    pool: RankPool, values: dict[str, Any]
) -> None:
    assert pool.run(spoil_unwatched, 2, values) == [False, False]


def test_no_false_alarm_in_clean_steps_and_every_spike_is_found() -> None:
    drawn = torch.Generator().manual_seed(0)
    for noise in (0.02, 0.2, 0.5):
        usual, alarms, found = Usual(6.0, math.log(2.0), CPU), 0, 0
        for step in range(1000):
            # A norm that falls from 5 to 1, with a noise that is skewed as norms are.
            clean = (1 + 4 / (1 + step / 30)) * torch.exp(noise * torch.randn((), generator=drawn))
            if step % 100 == 99:
                found += bool(usual.is_far(clean * 1000))
            far = usual.is_far(clean)
            alarms += bool(far)
            usual.take(clean, ~far)
        assert alarms == 0, noise
        assert found == 10, noise


def test_a_fused_optimizer_reads_the_flag_itself() -> None:
    """As on CUDA, where the host is not to wait for it."""

    class Unread(Tensor):
        def __bool__(self) -> bool:
            raise AssertionError("the host has read the flag")

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    steps = []
    for refused in (False, True, False):
        weight.grad = torch.full((3,), torch.nan if refused else 1.0)
        before = weight.detach().clone()
        update(optimizer, [torch.tensor(refused).as_subclass(Unread)])
        assert torch.equal(weight.detach(), before) == refused
        steps.append(float(optimizer.state[weight]["step"]))
    assert steps == [1.0, 1.0, 2.0]


# -- going back --------------------------------------------------------------------------------------------------------


def go_back(values: dict[str, Any], folder: str) -> tuple[bool, int, list[str]]:
    plain, _ = train(values, (1, 2, 1, 1), [], BadSteps(6.0, 2), folder=f"{folder}/plain")
    faults = [Fault("nan", "gradients", rank=r, step=s, seed=1) for r in (0, 1) for s in (6, 7)]
    seen, trainer = train(values, (1, 2, 1, 1), faults, BadSteps(6.0, 2), folder=f"{folder}/back")
    names = sorted(path.name for path in Path(folder, "back").iterdir())
    return same(plain.after[8], seen.after[8]), trainer.back.count, names


def test_bad_steps_in_a_row_by_chance_are_undone_and_the_run_ends_as_it_would_have(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    for is_same, rollbacks, names in pool.run(go_back, 2, values, str(tmp_path)):
        assert is_same
        assert rollbacks == 1
        # That of step 6 was saved in the midst of it.
        assert names == ["step-2", "step-4", "step-6", "step-6.undone-0", "step-8"]


class BadText(Callback):
    """Some samples give no numbers, however often they come."""

    def __init__(self, samples: range) -> None:
        self._samples, self.skipped_to = samples, 0

    def on_gradients(self, trainer: Trainer) -> None:
        if trainer.training.data["samples"] in self._samples:
            for parameter in trainer.model.parameters():
                assert parameter.grad is not None
                parameter.grad.to_local().fill_(torch.nan)  # type: ignore[attr-defined]

    def on_rollback(self, trainer: Trainer) -> None:
        self.skipped_to = int(trainer.training.data["samples"])


def get_past(values: dict[str, Any], folder: str, bad: range) -> tuple[int, int, int]:
    text = BadText(bad)
    _, trainer = train(values, (1, 2, 1, 1), [], text, BadSteps(6.0, 2), folder=folder)
    return trainer.back.count, text.skipped_to, trainer.step


def test_text_that_gives_no_numbers_is_passed_over_the_second_time(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    # Steps 5 and 6 have the samples 32 to 47.
    assert pool.run(get_past, 2, values, str(tmp_path), range(32, 48)) == [(2, 48, 8)] * 2


def test_a_run_that_does_not_recover_ends_in_words(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="gone back to twice; look at the text"):
        pool.run(get_past, 2, values, str(tmp_path), range(32, 10**6))


def remember(values: dict[str, Any], folder: str) -> tuple[bool, float]:
    train(values, (1, 2, 1, 1), [Fault("nan", "gradients", step=3)], BadSteps(6.0, 5), folder=folder, steps=4)
    first, again = BadSteps(6.0, 5), BadSteps(6.0, 5)
    train(values, (1, 2, 1, 1), [Fault("nan", "gradients", step=3)], first, steps=6)
    seen, _ = train(values, (1, 2, 1, 1), [], again, folder=folder, steps=6)
    alike = [
        torch.equal(first._usual[n].values.nan_to_num(), again._usual[n].values.nan_to_num())
        for n in first._usual
    ]
    return all(alike), seen.figures[6].get("skipped_steps", -1.0)


def test_what_is_usual_is_remembered_by_a_checkpoint(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    found = pool.run(remember, 2, values, str(tmp_path))
    assert [alike for alike, _ in found] == [True, True]
    assert found[0][1] == 1.0


# -- replicas ----------------------------------------------------------------------------------------------------------


def corrupt(values: dict[str, Any], folder: str) -> tuple[bool, int, str]:
    plain, _ = train(values, (3, 1, 1, 1), [], ReplicaConsistencyCheck(5), folder=f"{folder}/plain", batch=12)
    fault = Fault("flip", "step", rank=1, step=7, seed=3)
    with redirect_stderr(StringIO()) as said:
        seen, trainer = train(
            values, (3, 1, 1, 1), [fault], ReplicaConsistencyCheck(5), folder=f"{folder}/flip", batch=12
        )
    return same(plain.after[8], seen.after[8]), trainer.back.count, said.getvalue()


def test_a_flipped_bit_in_a_replica_is_named_undone_and_not_saved(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    # Before the save of step 8; the last one that was agreed on is that of step 6.
    found = pool.run(corrupt, 3, values, str(tmp_path))
    assert [(is_same, rollbacks) for is_same, rollbacks, _ in found] == [(True, 1)] * 3
    assert "step 8: the weights of rank 1 are not those of the replicas" in found[0][2]
    assert not list(tmp_path.glob("flip/*undone*"))


def corrupt_and_stop(values: dict[str, Any], folder: str) -> tuple[str, list[int]]:
    """Asked to stop after step 4, it saves after step 5, in which a bit flips; no interval ends there."""
    run = on(
        values, (1, 1, 1, 1), checkpoints={"folder": folder, "every_steps": 2}, batch={"tokens": 12 * LENGTH}
    )
    run = run.model_copy(update={"grid": run.grid.model_copy(update={"data": 3})})
    fault = Fault("flip", "step", rank=1, step=5, seed=3)
    with redirect_stderr(StringIO()) as said:
        train_run(run, Injector([fault]), ReplicaConsistencyCheck(100), saves=True, stop_at=4)
    return said.getvalue(), retention.steps(open_folder(folder))


def test_a_flipped_bit_is_not_saved_when_the_run_is_asked_to_stop(
    pool: RankPool, values: dict[str, Any], tmp_path: Path
) -> None:
    for rank, (said, steps) in enumerate(pool.run(corrupt_and_stop, 3, values, str(tmp_path))):
        assert steps == [2, 4]
        assert rank or "step 5: the weights of rank 1 are not those of the replicas" in said


def flip_and_ask(values: dict[str, Any]) -> list[tuple[int, int]]:
    """Each rank in turn; on (2,1,1,2) two replicas of two ranks each."""
    run = on(values, (2, 1, 1, 2))
    trainer = Trainer(run, Grid.create((2, 1, 1, 2)))
    same_weights = ReplicaConsistencyCheck(1)
    found = [same_weights._odd_ranks(trainer)]
    for rank in range(4):
        if torch.distributed.get_rank() == rank:
            flip_weight(list(trainer.model.parameters()), random.Random(rank))
        found.append(same_weights._odd_ranks(trainer))
        if torch.distributed.get_rank() == rank:
            flip_weight(list(trainer.model.parameters()), random.Random(rank))
    return found


def test_with_two_replicas_both_are_named_on_all_ranks(pool: RankPool, values: dict[str, Any]) -> None:
    for none, *odd in pool.run(flip_and_ask, 4, values):
        assert none[1] == -1
        assert odd == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_majorities() -> None:
    assert odd_ones([1, 1, 1, 1]) == []
    assert odd_ones([1, 2, 1, 3]) == [0, 1, 2, 3]
    assert odd_ones([1, 2, 1, 1, 3]) == [1, 4]


# -- a slow rank -------------------------------------------------------------------------------------------------------


class GivenSeconds(Stragglers):
    """Steps of given times: 2 s on rank 2 and 1 s elsewhere, without waits."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        own_s = 2.0 if torch.distributed.get_rank() == 2 else 1.0
        super().on_step(trainer, replace(result, start=0.0, end=own_s))


def train_for_given_seconds(values: dict[str, Any], factor: float) -> dict[int, float]:
    watch = GivenSeconds(3, factor)
    with patch.object(stragglers, "_waited_s", lambda trainer: 0.0):
        train(values, (1, 2, 1, 2), [], watch, steps=10)
    return watch.named


@pytest.mark.parametrize(("factor", "named"), [(1.5, {2: 2.0}), (2.5, {})])
def test_a_rank_that_is_slow_by_the_factor_is_named_by_all(
    pool: RankPool, values: dict[str, Any], factor: float, named: dict[int, float]
) -> None:
    assert pool.run(train_for_given_seconds, 4, values, factor) == [named] * 4


def be_slow(values: dict[str, Any], seconds: float) -> dict[int, float]:
    watch = Stragglers(3, 1.5)
    fault = Fault("slow", "step", rank=2, step=1, seconds=seconds, steps=20)
    train(values, (1, 2, 1, 2), [fault], watch, steps=10)
    return watch.named


@pytest.mark.nightly
def test_a_slow_rank_is_named_by_all(pool: RankPool, values: dict[str, Any]) -> None:
    for named in pool.run(be_slow, 4, values, 0.5):
        assert list(named) == [2]
        assert named[2] > 1.5
