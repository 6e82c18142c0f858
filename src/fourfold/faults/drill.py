"""A drill: a short run of the user's own, disturbed in one way after the other, and what has to hold each time.

An undisturbed run comes first. A disturbed one has to fail or to go on as it should, and, started again, to end with the
checkpoint of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from fourfold.faults.fault import Fault
from fourfold.faults.files import damage
from fourfold.train.checkpoint.commit import step_name
from fourfold.train.checkpoint.folder import open_folder
from fourfold.train.checkpoint.latest import steps
from fourfold.train.checkpoint.manifest import find_damage, read_json, read_manifest
from fourfold.train.checkpoint.state import VALUES
from fourfold.train.metrics import read_metrics

STEPS, SAVE_EVERY = 8, 2
MARKER = ".fourfold-drill"  # a file in the folder of a drill, which may be emptied
SLOWER = 2.0  # times a usual step, that a slow rank sleeps in each
# Starts the ranks with these changes of the run's file and these faults; what they end with.
Launch = Callable[[Sequence[str], Sequence[Fault]], int]


@dataclass(frozen=True)
class Exercise:
    """One disturbance, and what is to come of it."""

    name: str
    fault: Fault | None
    # Does the run go on by itself? Otherwise it is to fail, and to go on when it is started again.
    goes_on: bool = False
    # What its folder has to show beside that; what is wrong, in words.
    shows: Callable[[Path, Fault], list[str]] = lambda folder, fault: []
    # Is its end that of the undisturbed run? Not if a step was left out.
    exact: bool = True
    # Of the run's file, for this alone.
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    name: str
    fault: str
    seconds: float
    wrong: list[str]  # nothing, if all is as it should be


def exercises(ranks: int, replicas: int, seed: int, timeout_s: float) -> list[Exercise]:
    """What is disturbed, on drawn ranks in drawn steps; without other ranks nobody can wait for one."""
    choose = random.Random(seed)

    def somewhere() -> tuple[int, int]:
        return choose.randrange(ranks), choose.randint(SAVE_EVERY + 1, STEPS - 1)

    def saving() -> int:
        return choose.randrange(SAVE_EVERY * 2, STEPS, SAVE_EVERY)

    found = [
        Exercise("a rank is killed in forward", Fault("kill", "forward", *somewhere())),
        Exercise("a rank is killed in the optimizer", Fault("kill", "optimizer", *somewhere())),
        Exercise(
            "a rank is killed while it writes its weights",
            Fault("kill", "write", choose.randrange(ranks), saving(), "rank-*.safetensors"),
        ),
        Exercise("rank 0 is killed before a checkpoint has its name", Fault("kill", "rename", 0, saving())),
        Exercise("the disk is full", Fault("enospc", "write", choose.randrange(ranks), saving())),
        Exercise("a file of the newest checkpoint is damaged", None),
    ]
    found.append(
        Exercise(
            "a gradient is no number",
            Fault("nan", "gradients", *somewhere(), seed=seed),
            goes_on=True,
            exact=False,
            shows=lambda run, fault: _figure(run, "skipped_steps", 1),
        )
    )
    if replicas > 1:
        found.append(
            Exercise(
                "a bit of a replica's weights is flipped",
                Fault("flip", "step", *somewhere(), seed=seed),
                goes_on=True,
                shows=lambda run, fault: _figure(run, "rollbacks", 1),
            )
        )
    if ranks > 1:
        found.append(Exercise("a rank is killed in a collective", Fault("kill", "collective", *somewhere())))
        found.append(
            Exercise(
                "a rank is slow",
                Fault("slow", "step", choose.randrange(ranks), 1, steps=STEPS),
                goes_on=True,
                shows=lambda run, fault: _figure(run, "straggler", fault.rank),
                changes=("reliability.check_every_steps=2",),
            )
        )
        found.append(
            Exercise(
                "a rank is stopped",
                Fault("stop", "forward", *somewhere()),
                shows=_names_the_stopped,
                changes=(f"reliability.timeout_s={timeout_s:g}",),
            )
        )
    return found


def _figure(run: Path, name: str, expected: float) -> list[str]:
    found = read_metrics(run / "logs")[-1].get(name)
    return [] if found == expected else [f"{name} is {found} at the end, not {expected}"]


def _names_the_stopped(run: Path, fault: Fault) -> list[str]:
    summary = run / "logs" / "hang" / "summary.txt"
    said = summary.read_text() if summary.exists() else "nothing"
    return (
        [] if f"rank {fault.rank} never arrived" in said else [f"rank {fault.rank} is not named: {said:.300}"]
    )


def drill(folder: Path, wanted: Sequence[Exercise], launch: Launch, *, seed: int = 0) -> Iterator[Outcome]:
    """Every exercise in a folder of its own; what comes of it, one after the other."""
    undisturbed = folder / "undisturbed"
    start_s = time.monotonic()
    code = launch(changes_for(undisturbed), [])
    wrong = [] if code == 0 else [f"it ended with status {code}; nothing can be compared with it"]
    yield Outcome("nothing is disturbed", "", time.monotonic() - start_s, wrong)
    if wrong:
        return
    for number, exercise in enumerate(wanted, 1):
        start_s = time.monotonic()
        wrong = _one(folder / f"{number:02d}", exercise, launch, undisturbed, seed + number)
        yield Outcome(exercise.name, str(exercise.fault or "damage"), time.monotonic() - start_s, wrong)


def _one(run: Path, exercise: Exercise, launch: Launch, undisturbed: Path, seed: int) -> list[str]:
    changes = [*changes_for(run), *exercise.changes]
    fault = exercise.fault
    if fault is None:
        shutil.copytree(undisturbed, run)
        file, way = damage(run / "checkpoints" / step_name(STEPS), seed)
        code = launch(changes, [])
        wrong = [] if code == 0 else [f"{way} of {file.name}: started again, it ended with status {code}"]
        aside = list((run / "checkpoints").glob(f"{step_name(STEPS)}.damaged-*"))
        return (
            wrong + ([] if aside else [f"{way} of {file.name} was not noticed"]) + compare(run, undisturbed)
        )
    if fault.action == "slow" and not fault.seconds:
        usual_s = median(figures["seconds"] for figures in read_metrics(undisturbed / "logs"))
        fault = replace(fault, seconds=round(max(0.2, SLOWER * usual_s), 3))
    code = launch(changes, [fault])
    wrong = exercise.shows(run, fault)
    if exercise.goes_on:
        wrong += [] if code == 0 else [f"it ended with status {code}, where it should have gone on"]
    else:
        wrong += [] if code != 0 else ["it ended as if nothing had happened"]
        code = launch(changes, [])
        wrong += [] if code == 0 else [f"started again, it ended with status {code}"]
    return wrong + (compare(run, undisturbed) if exercise.exact else [])


def changes_for(run: Path) -> list[str]:
    """What makes the run short, and its folders those of the drill."""
    return [
        f"checkpoints.folder={run / 'checkpoints'}",
        f"logging.folder={run / 'logs'}",
        f"checkpoints.every_steps={SAVE_EVERY}",
        f"checkpoints.keep={STEPS}",
        f"schedule.steps={STEPS}",
        "schedule.warmup_steps=0",
        "schedule.decay_steps=0",
        "schedule.kind=constant",
        "logging.every_steps=1",
        "logging.tensorboard=false",
    ]


def compare(run: Path, undisturbed: Path, step: int = STEPS) -> list[str]:
    """In what the last checkpoints differ: weights, optimizer, step, samples, seed."""
    found = []
    for which in (run, undisturbed):
        root = open_folder(which / "checkpoints")
        if not steps(root) or find_damage(root.child(step_name(step)), step):
            return [f"{root}: has no valid checkpoint of step {step}"]
        folder = root.child(step_name(step))
        hashes = {n: r.xxh3_128 for n, r in read_manifest(folder, step).files.items() if n != VALUES}
        values = read_json(folder, VALUES)
        found.append(hashes | {key: json.dumps(values[key]) for key in ("step", "seed", "data", "optimizer")})
    mine, theirs = found
    return [f"{name} is not that of the undisturbed run" for name in theirs if mine.get(name) != theirs[name]]


def clear(folder: Path) -> None:
    """A drill begins anew: resumed runs of an earlier one would show nothing. What no drill wrote is not its to remove."""
    there = sorted(folder.iterdir()) if folder.exists() else []
    if there and not (folder / MARKER).exists():
        raise ValueError(
            f"{folder} is not empty, and it is not of a drill on one machine ({there[0].name} is there, {MARKER} is not); give "
            "another --folder, or remove it yourself"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # First, and never removed: a drill that is interrupted here can begin anew.
    (folder / MARKER).touch()
    for path in there:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
