"""A Slurm job: a script that a person can read and change, and its submission.

The head of the script has all settings by name; its body (slurm.sh) is the same for all runs.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fourfold.launch.world import World
from fourfold.processes import CONTINUE, MAX_RESTARTS

# Options that the body relies on, and the option of `fourfold launch slurm` that sets each, if any.
SET_HERE = {
    "nodes": "--nodes",
    "ntasks": None,
    "ntasks-per-node": None,
    "gpus-per-node": "--gpus-per-node",
    "signal": "--grace-period",
    "requeue": None,
    "no-requeue": "--max-requeues 0",
    "open-mode": None,
    "output": "--logs",
    "chdir": "--folder",
}


@dataclass(frozen=True)
class SlurmJob:
    """All settings of a job."""

    world: World
    # The command of each rank, as torchrun's arguments: a script or ``-m module``, and its arguments.
    command: Sequence[str]
    name: str
    # Working directory, for relative paths in the run config. All nodes need access to it.
    folder: Path
    logs: Path
    python: str
    # Options of sbatch by name; None for those without a value.
    options: dict[str, str | None]
    # Commands before the run, such as "module load cuda".
    setup: Sequence[str] = ()
    # Seconds from Slurm's warning to the time limit; a step and a checkpoint have to fit in.
    grace_period_s: int = 120
    max_requeues: int = 100
    # Restarts of the ranks within a start of the job.
    max_restarts: int = MAX_RESTARTS

    def __post_init__(self) -> None:
        if self.grace_period_s < 10:
            raise ValueError(f"--grace-period {self.grace_period_s} leaves no time to save; use 10 or more")
        limit_s = _seconds(self.options.get("time"))
        # Slurm may send the warning a minute early.
        if limit_s is not None and limit_s < self.grace_period_s + 120:
            raise ValueError(
                f"a time limit of {limit_s} s leaves too little time before the warning, {self.grace_period_s} s before its end; "
                f"use --time of {-(-(self.grace_period_s + 120) // 60)} minutes or more, or a smaller --grace-period"
            )
        for option, value in self.options.items():
            if option in SET_HERE:
                instead = SET_HERE[option]
                raise ValueError(
                    f"--sbatch {option} is set by the script itself"
                    + (f"; use {instead}" if instead else ", which relies on it; leave it out")
                )
            if not re.fullmatch("[a-z][a-z0-9-]+", option):
                raise ValueError(
                    f"{option!r} is not an option of sbatch; give its long name and a value, such as qos=high"
                )
            if value is not None and re.search(r"[\s#]", value):
                raise ValueError(f"--sbatch {option}={value!r} has a space or a #, which would end its line")


def _seconds(limit: str | None) -> int | None:
    """A time limit in sbatch's format; None if there is none, or if it is invalid, which sbatch reports.

    Example:
        >>> [_seconds(limit) for limit in ("90", "90:30", "1:30:00", "2-0", "1-12:30", "infinite")]
        [5400, 5430, 5400, 172800, 131400, None]
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit or "")
    if found is None:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    # The first number is hours after days or among three, and minutes otherwise.
    first_s = 3600 if days is not None or len(numbers) == 3 else 60
    return int(days or 0) * 86400 + sum(
        n * unit for n, unit in zip(numbers, (first_s, first_s // 60, 1), strict=False)
    )


def render(job: SlurmJob) -> str:
    """The batch script."""
    # Slurm splits these lines at unquoted spaces.
    options = {
        "job-name": shlex.quote(job.name),
        "nodes": str(job.world.nodes),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(job.world.gpus_per_node)} if job.world.gpus_per_node else {}),
        **job.options,
        "chdir": shlex.quote(str(job.folder)),
        "output": shlex.quote(f"{job.logs}/slurm-%j.out"),
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace_period_s}",
        "requeue": None,
    }
    settings = {
        "nodes": job.world.nodes,
        "ranks_per_node": job.world.ranks_per_node,
        "logs": job.logs,
        "grace_period_s": job.grace_period_s,
        "max_requeues": job.max_requeues,
        "max_restarts": job.max_restarts,
        "continue_exit_code": CONTINUE,
    }
    lines = [
        "#!/bin/bash",
        "# Written by `fourfold launch slurm`. Edit it as needed, and submit it with sbatch.",
        *(f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()),
        "",
        *([*job.setup, ""] if job.setup else []),
        f"python={shlex.quote(job.python)}",
        f"command=({shlex.join(job.command)})",
        *(f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()),
    ]
    return "\n".join(lines) + "\n" + (files("fourfold.launch") / "slurm.sh").read_text()


def submit(script: Path, logs: Path) -> str:
    """Submit the script; the job id."""
    # Slurm does not create the log folder, and a job without one fails silently before its first line.
    logs.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(
            f"there is no sbatch here; submit it on a host with Slurm: sbatch {script} (the folder {logs} has to exist)"
        ) from None
    if done.returncode:
        raise ValueError(f"sbatch rejected {script}: {done.stderr.strip()}")
    return done.stdout.strip().split(";")[0]
