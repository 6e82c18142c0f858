"""Bad values and slow ranks in real training of a small model: detection delay, correct rank, false alarms.

A NaN gradient, a gradient that is far too large, a flipped bit of one replica's weights, a rank that is slower by a fifth
of its step. Each is injected on a random rank in a random step; a run without faults must not report anything. With
``broken`` the callbacks that detect them are left out.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults import traced_run
from benchmarks.faults.row import Row
from benchmarks.ranks import RankPool
from fourfold.checkpoint import Checkpoints
from fourfold.config.run_file import load_run
from fourfold.drill.fault import Fault
from fourfold.drill.injector import Injector
from fourfold.mesh.grid import Grid
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.resilience.bad_steps import AT_LEAST, BadSteps
from fourfold.train.resilience.replica_check import ReplicaConsistencyCheck
from fourfold.train.resilience.stragglers import Stragglers

Shape = tuple[int, int, int, int]
WITHIN = 20  # steps
SLOWER = 0.2  # of a usual step
LONGEST = 60  # steps of a disturbed run
# Steps of tenths of a second: a fifth of 20 of them has to exceed the noise of a shared machine.
SEQUENCES = {"slow": 768, "clean": 768}
DETECTORS_OF_VALUES: tuple[type[Callback], ...] = (BadSteps, ReplicaConsistencyCheck)
DETECTORS = (*DETECTORS_OF_VALUES, Stragglers)
Line = tuple[int, str]  # the step and the printed message


def run(small: bool, broken: bool = False) -> Iterator[Row]:
    with RankPool(4, quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
        yield from rows(pool, Path(folder), 1 if small else 5, 100 if small else 1000, broken)


def rows(pool: RankPool, folder: Path, trials: int, clean_steps: int, broken: bool) -> Iterator[Row]:
    others = "NaN guards: OLMo-core, Megatron; none names a replica (a reading of their sources)"
    for what, shape, action in (
        ("a gradient is NaN", (1, 2, 1, 2), "nan"),
        ("a gradient is 10,000 times too large", (1, 2, 1, 2), "spike"),
        ("a bit of one of three replicas is flipped", (3, 1, 1, 1), "flip"),
        (f"a rank of two is slower by {SLOWER:.0%}", (2, 1, 1, 1), "slow"),
    ):
        found = [disturbed(pool, folder / f"{action}-{n}", shape, action, n, broken) for n in range(trials)]
        late = [steps for steps in found if steps is None or steps > WITHIN]
        known = [steps for steps in found if steps is not None]
        yield Row(
            f"{what}, {trials} times: found and named",
            f"{trials - len(late)}/{trials}, after {max(known)} steps at most" if known else f"0/{trials}",
            f"all, within {WITHIN} steps",
            not late,
            others if action != "slow" else "NVRx and Megatron name stragglers; none says how soon",
        )
    said = clean(pool, folder / "clean", clean_steps)
    yield Row(
        f"{clean_steps:,} steps without a fault: false alarms",
        f"{len(said)}" + (f": step {said[0][0]}: {said[0][1]:.120}" if said else ""),
        "0",
        not said,
        "none says",
    )


def disturbed(
    pool: RankPool,
    folder: Path,
    shape: Shape,
    action: Any,
    seed: int,
    broken: bool,
) -> int | None:
    """The number of steps until the fault was detected and named; None if it never was."""
    ranks, choose = dist_size(shape), random.Random(f"{action} {seed}")
    rank, step = choose.randrange(ranks), choose.randint(AT_LEAST + 2, LONGEST - WITHIN - 2)
    file = traced_run.write(folder, sequences=SEQUENCES.get(action, 24))
    if action == "slow":
        usual_s = median(pool.run(usual, ranks, str(file), shape)[rank])
        faults = [Fault("slow", "step", rank, step, steps=LONGEST, seconds=round(SLOWER * usual_s, 4))]
        named = rf"rank {rank} is slow"
    elif action == "flip":
        faults = [Fault("flip", "step", rank, step, seed=seed)]
        named = rf"the weights of rank {rank} differ from those"
    else:
        # After the reduction, a gradient that is too large on one rank is too large on all.
        on = [rank] if action == "nan" else range(ranks)
        faults = [Fault(action, "gradients", r, step, seed=seed) for r in on]
        named = rf"step {step} left the weights unchanged"
    # Only a run with a slow rank compares times: on a busy machine, other runs would report one as well.
    watched = () if broken else DETECTORS if action == "slow" else DETECTORS_OF_VALUES
    lines = pool.run(train, ranks, str(file), shape, faults, LONGEST, watched, timeout_s=600)[0]
    wrong = [text for at, text in lines if at < step]
    found = [at for at, text in lines if at >= step and re.search(named, text)]
    return found[0] - step if found and not wrong else None


def clean(pool: RankPool, folder: Path, steps: int) -> list[Line]:
    file = traced_run.write(folder, sequences=SEQUENCES["clean"])
    return pool.run(train, 2, str(file), (2, 1, 1, 1), [], steps, DETECTORS, timeout_s=1800)[0]


def dist_size(shape: Shape) -> int:
    data, z, y, x = shape
    return data * z * y * x


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Recorder(Callback):
    """Records the printed messages of each step; last among the callbacks."""

    def __init__(self, said: StringIO) -> None:
        self._said, self.lines = said, []  # type: tuple[StringIO, list[Line]]

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._collect(result.step)

    def on_rollback(self, trainer: Trainer) -> None:
        # Printed at the rollback; the text has the step.
        self._collect(None)

    def _collect(self, step: int | None) -> None:
        for text in self._said.getvalue().splitlines():
            found = re.match(r"step (\d+)", text)
            at = int(found[1]) if found else step
            self.lines.append((at if at is not None else 0, text))
        self._said.seek(0)
        self._said.truncate()


def train(
    file: str, shape: Shape, faults: Sequence[Fault], steps: int, watched: tuple[type[Callback], ...]
) -> list[Line]:
    saves = any(fault.action == "flip" for fault in faults)
    config = load_run(
        Path(file), [*traced_run.grid_changes(shape), f"schedule.steps={steps}", "checkpoints.every_steps=10"]
    )
    detectors = [c for c in callbacks_of(config) if isinstance(c, watched)]
    assert {type(detector) for detector in detectors} == set(watched)
    with redirect_stderr(StringIO()) as said:
        recorder = Recorder(said)
        trainer = Trainer(config, Grid.create(shape), [Injector(faults), *detectors, recorder])
        with Checkpoints(config.checkpoints.folder) if saves else nullcontext() as checkpoints:
            trainer.train(checkpoints)
        recorder._collect(steps)
    return recorder.lines


def usual(file: str, shape: Shape) -> list[float]:
    """This rank's own seconds per step in a run without a fault."""
    watch = Own(1, 1e9)
    config = load_run(Path(file), [*traced_run.grid_changes(shape), "schedule.steps=15"])
    Trainer(config, Grid.create(shape), [watch]).train()
    return watch.own_s[5:]


class Own(Stragglers):
    """Keeps the times that it compares."""

    def __init__(self, every_steps: int, factor: float) -> None:
        super().__init__(every_steps, factor)
        self.own_s: list[float] = []

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.own_s.append(result.seconds - self._waits_s[-1])
        super().on_step(trainer, result)
