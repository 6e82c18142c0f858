"""A job on a real Slurm of two nodes that is preempted, warned and loses a node: does it resume and end exactly?

Each preemption is another job that takes the nodes; each warning is the signal that Slurm sends before the time limit.
A minute after a node is lost, Slurm requeues the job by itself. Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import local_slurm
from benchmarks.faults import traced_run
from benchmarks.faults.row import Row
from benchmarks.local_slurm import ENDED, state, wait_until
from fourfold.checkpoint.commit import steps
from fourfold.checkpoint.folder import open_folder
from fourfold.drill.drill import compare
from fourfold.launch.slurm import SlurmJob, render, submit
from fourfold.launch.world import World, train_command
from fourfold.train.observe.metrics import METRICS, read_metrics

TIMES = 20
STEPS_BETWEEN = 3
FOREVER = 100_000  # steps, until the run config is changed
LIMIT_S = 240.0
OTHERS = "none of the nine systems that we read tests it"


def run(small: bool) -> Iterator[Row]:
    if reason := local_slurm.why_not():
        yield Row("a job of Slurm is preempted, warned, and loses a node", reason, "a Slurm here", False)
        return
    with (
        tempfile.TemporaryDirectory(prefix="fourfold-slurm-") as name,
        local_slurm.slurm(Path(name)) as daemons,
    ):
        yield from rows(Path(name), daemons, 1 if small else TIMES, loses_node=not small)


def rows(folder: Path, daemons: local_slurm.Daemons, times: int, *, loses_node: bool) -> Iterator[Row]:
    job = Job(folder / "job", FOREVER)
    saved = [job.preempted() if time % 2 == 0 else job.warned() for time in range(times)]
    yield Row(
        f"a job of Slurm on 2 nodes is preempted {-(-times // 2)} times and warned {times // 2} times: saved at its "
        "last step, and requeued",
        f"{sum(saved)}/{times}",
        "all",
        all(saved),
        OTHERS,
    )
    if loses_node:
        back = job.loses_node(daemons)
        yield Row(
            "a node is lost, slurmd and all of its processes: the job resumes",
            "running on its nodes" if back else f"it is {job.state()}",
            "running",
            back,
            OTHERS,
        )
    last = job.finish()
    undisturbed = Job(folder / "undisturbed", last)
    undisturbed.ends()
    seen = [int(line["step"]) for line in read_metrics(job.folder / "logs")]
    wrong = compare(job.folder, undisturbed.folder, last)
    wrong += [] if seen == list(range(1, last + 1)) else ["steps are missing or repeated"]
    yield Row(
        "and it ends as an undisturbed job, bit for bit",
        "; ".join(wrong) or "yes",
        "yes",
        not wrong,
    )


class Job:
    """A run of two ranks, one on each node."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self._write(steps)
        job = SlurmJob(
            World(2, ranks_per_node=1, gpus_per_node=0),
            train_command(folder / "run.toml", ()),
            name="faults",
            folder=folder,
            logs=folder / "logs",
            python=sys.executable,
            options={"time": "60", "partition": "main"},
            grace_period_s=60,
        )
        script = folder / "run.sbatch"
        script.write_text(render(job))
        self._number = submit(script, job.logs)

    def _write(self, steps: int) -> None:
        traced_run.write(
            self.folder,
            grid={"x": 2},
            schedule={"steps": steps},
            checkpoints={"every_steps": 50, "keep_last": 5},
        )

    def state(self) -> str:
        return state(self._number)

    def preempted(self) -> bool:
        """Preempt it by a more urgent job that takes both nodes."""
        self._trains_on()
        urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--output=/dev/null"]
        subprocess.run([*urgent, "--wrap=true"], check=True, stdout=subprocess.DEVNULL)
        return self._is_saved_and_waits()

    def warned(self) -> bool:
        """Send the warning that Slurm sends before the time limit."""
        self._trains_on()
        subprocess.run(["scancel", "--signal=USR1", "--batch", self._number], check=True)
        return self._is_saved_and_waits()

    def loses_node(self, daemons: local_slurm.Daemons) -> bool:
        """Take its second node away, which returns when Slurm has noticed."""
        self._trains_on()
        daemons.lose_node(local_slurm.NODES[1])
        wait_until(lambda: self.state() in ("PENDING", *ENDED), "requeued job", LIMIT_S)
        daemons.start_node(local_slurm.NODES[1])
        self._start_soon()
        before = len(self._steps())
        wait_until(lambda: self.state() in ENDED or len(self._steps()) > before, "step", LIMIT_S)
        return self.state() == "RUNNING"

    def finish(self) -> int:
        """Let it end soon after the current step; the last step."""
        self.warned()
        last = self._saved()[-1] + 2
        self._write(last)
        self.ends()
        return last

    def ends(self) -> None:
        wait_until(lambda: self.state() in ENDED, "end of the job", LIMIT_S)
        if self.state() != "COMPLETED":
            raise RuntimeError(f"job {self._number} is {self.state()}, see {self.folder}/logs")

    def _trains_on(self) -> None:
        first = self._saved()[-1:] or [0]
        enough = first[0] + STEPS_BETWEEN
        wait_until(lambda: (self._steps() or [0])[-1] >= enough, f"step {enough}", LIMIT_S)

    def _is_saved_and_waits(self) -> bool:
        wait_until(lambda: self.state() in ("PENDING", *ENDED), "requeued job", LIMIT_S)
        is_saved = self._steps()[-1:] == self._saved()[-1:]
        waits = self.state() == "PENDING"
        self._start_soon()
        return is_saved and waits

    def _start_soon(self) -> None:
        # Slurm delays a requeued job for two minutes. A few seconds are enough, but needed: within the same second, a
        # node would take the job for the killed one.
        subprocess.run(["scontrol", "update", f"JobId={self._number}", "StartTime=now+2"], check=False)

    def _saved(self) -> list[int]:
        return steps(open_folder(self.folder / "checkpoints"))

    def _steps(self) -> list[int]:
        if not (self.folder / "logs" / METRICS).exists():
            return []
        return [int(line["step"]) for line in read_metrics(self.folder / "logs")]
