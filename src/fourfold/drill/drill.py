"""A drill: a short run of the user's own, disturbed in one way after the other, and what has to hold each time.

An undisturbed run comes first. A disturbed one has to fail or to go on as it should, and, started again, to end with the
checkpoint of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from fourfold.checkpoint.commit import step_name
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import find_damage, read_json, read_manifest
from fourfold.checkpoint.retention import steps
from fourfold.checkpoint.state import VALUES
from fourfold.config.schema import RunConfig
from fourfold.drill.fault import Fault
from fourfold.drill.files import damage
from fourfold.drill.scenario import SAVE_EVERY, STEPS, Scenario
from fourfold.train.observe.metrics import read_metrics

MARKER = ".fourfold-drill"  # a file in the folder of a drill, which may be emptied
NOTES = "faults"  # in the folder of the logs: which faults have happened
SLOWER = 2.0  # times a usual step, that a slow rank sleeps in each
# Starts the ranks with these changes of the run's file and these faults; what they end with.
Launch = Callable[[Sequence[str], Sequence[Fault]], int]


@dataclass(frozen=True)
class Outcome:
    name: str
    fault: str
    seconds: float
    wrong: list[str]  # nothing, if all is as it should be


def drill(folder: Path, wanted: Sequence[Scenario], launch: Launch, *, seed: int = 0) -> Iterator[Outcome]:
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


def _one(run: Path, exercise: Scenario, launch: Launch, undisturbed: Path, seed: int) -> list[str]:
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
    wrong = [] if fault in happened(run) else ["it never happened: no rank came to that place"]
    wrong += exercise.expected.shows(run, fault)
    if exercise.expected.goes_on:
        wrong += [] if code == 0 else [f"it ended with status {code}, where it should have gone on"]
    else:
        wrong += [] if code != 0 else ["it ended as if nothing had happened"]
        code = launch(changes, [])
        wrong += [] if code == 0 else [f"started again, it ended with status {code}"]
    return wrong + (compare(run, undisturbed) if exercise.expected.exact else [])


def happened(run: Path) -> list[Fault]:
    """The faults that ranks have noted, each before it happened."""
    notes = run / "logs" / NOTES
    return [Fault.parse(note.name) for note in sorted(notes.iterdir())] if notes.is_dir() else []


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


def without_trackers(config: RunConfig) -> RunConfig:
    """A drill is no run of its user's project: nobody else hears of it. (No change of a file can say none.)"""
    none = dict.fromkeys(("wandb_project", "mlflow_uri", "prometheus_port", "profile_steps"))
    return config.model_copy(update={"logging": config.logging.model_copy(update=none)})


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
