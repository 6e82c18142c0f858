"""A drill: a short run of the user's config, repeated with one fault after the other.

An undisturbed run comes first. A disturbed run has to fail or to continue as expected, and, after a restart, to end with
the checkpoint of the undisturbed run, bit for bit.
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

from fourfold.checkpoint.commit import step_name, steps
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import find_damage, read_json, read_manifest
from fourfold.checkpoint.state import VALUES
from fourfold.config.schema import RunConfig
from fourfold.drill.fault import Fault
from fourfold.drill.scenario import EXPECTED, SAVE_EVERY, STEPS, Scenario
from fourfold.train.observe.metrics import read_metrics

MARKER = ".fourfold-drill"  # a file that marks a folder as a drill's, which may be emptied
NOTES = "faults"  # a folder in the log folder, with a file for each fault that has happened
SLOWER = 2.0  # a slow rank sleeps this many times the usual step time
# Starts the ranks with these changes of the run config and these faults; returns the exit code.
Launch = Callable[[Sequence[str], Sequence[Fault]], int]


@dataclass(frozen=True)
class Outcome:
    name: str
    fault: str
    seconds: float
    wrong: list[str]  # empty if all is as expected


def drill(folder: Path, wanted: Sequence[Scenario], launch: Launch, *, seed: int = 0) -> Iterator[Outcome]:
    """Run every scenario in a folder of its own, one after the other."""
    undisturbed = folder / "undisturbed"
    start_s = time.monotonic()
    code = launch(changes_for(undisturbed), [])
    wrong = [] if code == 0 else [f"it ended with exit code {code}; nothing can be compared with it"]
    yield Outcome("nothing is disturbed", "", time.monotonic() - start_s, wrong)
    if wrong:
        return
    for number, scenario in enumerate(wanted, 1):
        start_s = time.monotonic()
        wrong = _run_scenario(folder / f"{number:02d}", scenario, launch, undisturbed, seed + number)
        yield Outcome(scenario.name, str(scenario.fault or "damage"), time.monotonic() - start_s, wrong)


def _run_scenario(run: Path, scenario: Scenario, launch: Launch, undisturbed: Path, seed: int) -> list[str]:
    changes = [*changes_for(run), *scenario.changes]
    fault = scenario.fault
    if fault is None:
        shutil.copytree(undisturbed, run)
        choose = random.Random(seed)
        file = choose.choice(sorted((run / "checkpoints" / step_name(STEPS)).iterdir()))
        flip_bit(file, choose)
        code = launch(changes, [])
        wrong = [] if code == 0 else [f"restarted, it ended with exit code {code}"]
        if not list((run / "checkpoints").glob(f"{step_name(STEPS)}.damaged-*")):
            wrong.append(f"the flipped bit of {file.name} was not detected")
        return wrong + compare(run, undisturbed)
    if fault.action == "slow" and not fault.seconds:
        usual_s = median(line["seconds"] for line in read_metrics(undisturbed / "logs"))
        fault = replace(fault, seconds=round(max(0.2, SLOWER * usual_s), 3))
    code = launch(changes, [fault])
    wrong = [] if fault in injected_faults(run) else ["it never happened: no rank reached that point"]
    expected = EXPECTED[fault.action]
    wrong += expected.check(run, fault)
    if expected.continues:
        wrong += [] if code == 0 else [f"it ended with exit code {code}, and should have continued"]
    else:
        wrong += [] if code != 0 else ["it ended as if nothing had happened"]
        code = launch(changes, [])
        wrong += [] if code == 0 else [f"restarted, it ended with exit code {code}"]
    return wrong + (compare(run, undisturbed) if expected.exact else [])


def flip_bit(file: Path, choose: random.Random) -> None:
    """Flip a bit of a file, as a failing disk or a copy may."""
    data = bytearray(file.read_bytes())
    bit = choose.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def injected_faults(run: Path) -> list[Fault]:
    """The faults that ranks have recorded, each just before it happened."""
    notes = run / "logs" / NOTES
    return [Fault.parse(note.name) for note in sorted(notes.iterdir())] if notes.is_dir() else []


def changes_for(run: Path) -> list[str]:
    """Changes of the run config that make the run short and put its files into ``run``."""
    return [
        f"checkpoints.folder={run / 'checkpoints'}",
        f"logging.folder={run / 'logs'}",
        f"checkpoints.every_steps={SAVE_EVERY}",
        f"checkpoints.keep_last={STEPS}",
        f"schedule.steps={STEPS}",
        "schedule.warmup_steps=0",
        "schedule.decay_steps=0",
        "schedule.kind=constant",
        "logging.every_steps=1",
        "logging.tensorboard=false",
    ]


def without_trackers(config: RunConfig) -> RunConfig:
    """Switch off trackers: a drill is not a run of the user's project. (A --set cannot say "none".)"""
    none = dict.fromkeys(("wandb_project", "mlflow_uri", "prometheus_port", "profile_steps"))
    return config.model_copy(update={"logging": config.logging.model_copy(update=none)})


def compare(run: Path, undisturbed: Path, step: int = STEPS) -> list[str]:
    """How the last checkpoints differ: weights, optimizer, step, samples, seed."""
    found = []
    for which in (run, undisturbed):
        root = open_folder(which / "checkpoints")
        if not steps(root) or find_damage(root.child(step_name(step)), step):
            return [f"{root}: has no valid checkpoint of step {step}"]
        folder = root.child(step_name(step))
        hashes = {n: r.xxh3_128 for n, r in read_manifest(folder, step).items() if n != VALUES}
        values = read_json(folder, VALUES)
        found.append(hashes | {key: json.dumps(values[key]) for key in ("step", "seed", "data", "optimizer")})
    mine, theirs = found
    return [f"{name} is not that of the undisturbed run" for name in theirs if mine.get(name) != theirs[name]]


def clear(folder: Path) -> None:
    """Empty the folder, since runs resumed from an earlier drill would show nothing; keep what no drill wrote."""
    there = sorted(folder.iterdir()) if folder.exists() else []
    if there and not (folder / MARKER).exists():
        raise ValueError(
            f"{folder} is not empty, and no drill on one machine wrote it ({there[0].name} is there, {MARKER} is not); give "
            "another --folder, or remove it yourself"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # First, and never removed: a drill that is interrupted here can start again.
    (folder / MARKER).touch()
    for path in there:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
