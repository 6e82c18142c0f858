"""A drill on a cluster: a launcher starts the ranks, and a disturbed run is compared with an undisturbed one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fourfold.checkpoint.commit import step_name, steps
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import find_damage
from fourfold.config.run_file import load_run
from fourfold.config.schema import RunConfig
from fourfold.drill.drill import NOTES, changes_for, compare, injected_faults, without_trackers
from fourfold.drill.fault import Fault
from fourfold.drill.scenario import EXPECTED, check_fault, last_step, scenario_for

# How often torchrun or Slurm has restarted this rank.
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def begin(
    file: Path, changes: Sequence[str], folder: Path, faults: Sequence[Fault], timeout_s: float
) -> RunConfig:
    """The run config of this rank; rejects a drill in which the faults could not happen."""
    run = _run_of(folder, faults)
    own = [change for fault in faults for change in scenario_for(fault, timeout_s).changes]
    config = without_trackers(load_run(file, [*changes, *changes_for(run), *own]))
    started = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS", "1"))
    ranks = started if config.grid.auto else config.grid.size
    for fault in faults:
        check_fault(fault, ranks, ranks if config.grid.auto else config.grid.data)
        if fault.action == "slow" and not fault.seconds:
            raise ValueError(f"{fault} has no duration; add seconds=, twice the time of a step")
    if all(os.environ.get(name, "0") == "0" for name in RESTARTS):
        _reject_leftovers(run, faults, config.schedule.steps)
    return config


def _reject_leftovers(run: Path, faults: Sequence[Fault], last: int) -> None:
    there, notes = steps(open_folder(run / "checkpoints")), injected_faults(run)
    # Restarted by hand, after the requested faults have happened.
    resumes = notes and set(notes) <= set(faults) and last not in there
    if (there or notes) and not resumes:
        found = f"step-{there[-1]}" if there else str(notes[0])
        raise ValueError(
            f"{run} has {found} of an earlier drill, and this one would resume from there instead of being disturbed; remove "
            "that folder, or give another --folder"
        )


def judge(folder: Path, faults: Sequence[Fault]) -> tuple[list[str], str]:
    """(what is wrong with the disturbed run, the verdict if nothing is)."""
    run = _run_of(folder, [Fault("kill", "step")])
    notes = injected_faults(run)
    missing = [str(fault) for fault in faults if fault not in notes]
    if missing or not notes:
        what = " and ".join(missing) or "no fault"
        return [
            f"{run}: {what} has{' not' if missing else ''} happened there, according to {run / 'logs' / NOTES}"
        ], ""
    known = [EXPECTED[fault.action] for fault in notes]
    wrong = [
        line for fault, expected in zip(notes, known, strict=True) for line in expected.check(run, fault)
    ]
    if all(expected.exact for expected in known):
        wrong += compare(run, _run_of(folder, []))
        return wrong, "the disturbed run ended as the undisturbed one did, bit for bit"
    last = max(last_step(fault) for fault in notes)
    if find_damage(open_folder(run / "checkpoints").child(step_name(last)), last):
        wrong.append(f"{run / 'checkpoints'}: has no valid checkpoint of step {last}")
    return wrong, "the disturbed run skipped its bad step and continued; its weights are not compared"


def _run_of(folder: Path, faults: Sequence[Fault]) -> Path:
    return folder.resolve() / ("disturbed" if faults else "undisturbed")
