"""A drill on a cluster: ranks that somebody else starts, and what two of their runs have left, disturbed and not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fourfold.checkpoint.commit import step_name
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import find_damage
from fourfold.checkpoint.retention import steps
from fourfold.config.run_file import load_run
from fourfold.config.schema import RunConfig
from fourfold.drill.drill import NOTES, changes_for, compare, happened, without_trackers
from fourfold.drill.fault import Fault
from fourfold.drill.scenario import exercise_of, last_step, refuse

# How often a launcher has started this rank again: torchrun's word for it, and Slurm's.
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def begin(
    file: Path, changes: Sequence[str], folder: Path, faults: Sequence[Fault], timeout_s: float
) -> RunConfig:
    """The run of this rank, before it joins the others; refuses what would end well without a fault."""
    run = _run_of(folder, faults)
    own = [change for fault in faults for change in exercise_of(fault, timeout_s).changes]
    config = without_trackers(load_run(file, [*changes, *changes_for(run), *own]))
    ranks = _world_size() if config.grid.auto else config.grid.size
    for fault in faults:
        refuse(fault, ranks, ranks if config.grid.auto else config.grid.data)
        if fault.action == "slow" and not fault.seconds:
            raise ValueError(f"{fault} does not say how long; add seconds=, twice what a step takes")
    if all(os.environ.get(name, "0") == "0" for name in RESTARTS):
        _refuse_what_is_there(run, faults, config.schedule.steps)
    return config


def _refuse_what_is_there(run: Path, faults: Sequence[Fault], last: int) -> None:
    there, notes = steps(open_folder(run / "checkpoints")), happened(run)
    # Started again by hand, after what was asked for has happened.
    goes_on = notes and set(notes) <= set(faults) and last not in there
    if (there or notes) and not goes_on:
        found = f"step-{there[-1]}" if there else str(notes[0])
        raise ValueError(
            f"{run} has {found} of an earlier drill, and this one would go on from there instead of being disturbed; remove "
            "that folder, or give another --folder"
        )


def judge(folder: Path, faults: Sequence[Fault]) -> tuple[list[str], str]:
    """(what is wrong with the disturbed run, what can be said of it if nothing is)."""
    run = _run_of(folder, [Fault("kill", "step")])
    notes = happened(run)
    missing = [str(fault) for fault in faults if fault not in notes]
    if missing or not notes:
        what = " and ".join(missing) or "no fault"
        return [
            f"{run}: {what} has{' not' if missing else ''} happened there, says {run / 'logs' / NOTES}"
        ], ""
    known = [exercise_of(fault, 0.0).expected for fault in notes]
    wrong = [
        line for fault, expected in zip(notes, known, strict=True) for line in expected.shows(run, fault)
    ]
    if all(expected.exact for expected in known):
        wrong += compare(run, _run_of(folder, []))
        return wrong, "the disturbed run ended as the undisturbed one did, bit for bit"
    last = max(last_step(fault) for fault in notes)
    if find_damage(open_folder(run / "checkpoints").child(step_name(last)), last):
        wrong.append(f"{run / 'checkpoints'}: has no valid checkpoint of step {last}")
    return wrong, "the disturbed run noticed its bad step and went on; its weights are not compared"


def _run_of(folder: Path, faults: Sequence[Fault]) -> Path:
    return folder.resolve() / ("disturbed" if faults else "undisturbed")


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
