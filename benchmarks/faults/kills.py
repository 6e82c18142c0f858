"""Ranks killed anywhere, again and again: does every run end as the undisturbed one, bit for bit?

A run of 4 ranks is started by the agent of `fourfold train`. In each attempt one rank is killed: at a point of a step, in
the middle of a save, at an instant, or before it has met the others; drawn from the seed of the run. The last attempt is
left alone.

    python -m benchmarks.faults.kills RUN.toml SEED KILLS      # one rank, under the agent
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.faults import traced_run
from benchmarks.faults.row import Row
from fourfold.drill.drill import compare
from fourfold.drill.fault import Fault, random_kill
from fourfold.processes import CONTINUE

GRIDS = ((1, 2, 1, 2), (2, 1, 2, 1))
RANKS, STEPS, EVERY = 4, 40, 4
RUNS, KILLS = 30, 7  # of each run, if all are met
WINDOW = EVERY + 3  # steps of an attempt within which its kill falls
YOUNG, YOUNG_S = 0.15, 1.5  # so many of them before the ranks have met
MEDIAN_BAR_S = 8.0
LIMIT_S = 600.0  # of a run; it would have hung
OTHERS = "torch 2.13 alone: 81 kills in 30 runs exact with tmp+rename; 4 of 15 restarts of torchrun clean (measured)"


@dataclass
class Outcome:
    """What came of one run."""

    kills: int = 0
    attempts: int = 0
    wrong: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)  # from a kill to the first step after it
    lost: list[int] = field(default_factory=list)  # steps that were done and had to be done again


def run(small: bool) -> Iterator[Row]:
    runs, kills = (1, 3) if small else (RUNS, KILLS)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="fourfold-kills-") as name:
        folder = Path(name)
        grids = GRIDS[:1] if small else GRIDS
        steps = 16 if small else STEPS
        for shape in grids:
            train(folder / f"undisturbed-{shape}", shape, steps, seed=0, kills=0)
        for number in range(runs):
            shape = grids[number % len(grids)]
            outcome = disturbed(folder, shape, steps, number, kills)
            outcomes.append(outcome)
            print(
                f"       run {number + 1}/{runs}: {outcome.kills} kills, {outcome.attempts} attempts, "
                f"back after {', '.join(f'{s:.1f}' for s in outcome.back_s)} s {'; '.join(outcome.wrong)}",
                flush=True,
            )
    yield from rows(outcomes, "" if not small else " (small)")


def rows(outcomes: list[Outcome], note: str) -> Iterator[Row]:
    killed = sum(outcome.kills for outcome in outcomes)
    bad = [wrong for outcome in outcomes for wrong in outcome.wrong]
    exact = sum(not outcome.wrong for outcome in outcomes)
    name = f"{killed} random SIGKILLs over {len(outcomes)} runs on {RANKS} ranks{note}"
    yield Row(
        f"{name}: ends bit-identical in weights, optimizer, generators and samples",
        f"{exact}/{len(outcomes)}" + (f" ({bad[0]})" if bad else ""),
        "all",
        exact == len(outcomes) and killed > 0,
        OTHERS,
    )
    again = sum(outcome.attempts - 1 - outcome.kills for outcome in outcomes)
    yield Row(f"{name}: restarts that need a second try", str(again), "0", again == 0, "11 of 15 (torchrun)")
    back_s = [s for outcome in outcomes for s in outcome.back_s]
    middle_s = median(back_s) if back_s else float("inf")
    yield Row(
        f"{name}: from the kill to the first new step, median",
        f"{middle_s:.1f} s (longest {max(back_s, default=0):.1f} s)",
        f"<= {MEDIAN_BAR_S:g} s",
        middle_s <= MEDIAN_BAR_S,
        "3.2 to 4.4 s for a script without a model, when clean",
    )
    lost = [steps for outcome in outcomes for steps in outcome.lost]
    yield Row(
        f"{name}: steps lost",
        f"at most {max(lost, default=0)}, {sum(lost)} in all",
        f"<= {EVERY}, the save interval",
        max(lost, default=0) <= EVERY,
    )


def disturbed(folder: Path, shape: tuple[int, ...], steps: int, seed: int, kills: int) -> Outcome:
    here, undisturbed = folder / f"run-{seed}", folder / f"undisturbed-{shape}"
    outcome = Outcome()
    code = train(here, shape, steps, seed, kills)
    if code != 0:
        outcome.wrong.append(
            f"run {seed} ended with status {code}: {(here / 'ranks.log').read_text()[-300:]!r}"
        )
        return outcome
    outcome.wrong += compare(here, undisturbed, steps)
    mine, theirs = traced_run.traces(here / "logs"), traced_run.traces(undisturbed / "logs")
    for rank in range(RANKS):
        if traced_run.steps_done(mine[rank]) != traced_run.steps_done(theirs[rank]):
            outcome.wrong.append(f"rank {rank} did other steps than undisturbed")
    read_outcome(here / "logs", outcome)
    if not outcome.wrong:
        shutil.rmtree(here)
    return outcome


def read_outcome(logs: Path, outcome: Outcome) -> None:
    """Kills, attempts, times and lost steps, from what the ranks wrote down."""
    lines = [line for own in traced_run.traces(logs).values() for line in own]
    killed_s = {int(note.parent.name): note.stat().st_mtime for note in (logs / "killed").glob("*/*")}
    outcome.kills, outcome.attempts = len(killed_s), 1 + max(line["attempt"] for line in lines)
    for attempt, kill_s in sorted(killed_s.items()):
        done = max(
            (line["step"] for line in lines if "step" in line and line["attempt"] <= attempt), default=0
        )
        after = [line for line in lines if line["attempt"] > attempt]
        first_s = min((line["time"] for line in after if "step" in line), default=None)
        following = [line for line in after if line["attempt"] == attempt + 1]
        if first_s is not None and any("step" in line for line in following):
            outcome.back_s.append(first_s - kill_s)
        resumed = [line["resumed"] for line in following if "resumed" in line]
        if resumed and any("step" in line for line in lines if line["attempt"] == attempt):
            outcome.lost.append(done - resumed[0])


def write(folder: Path, shape: tuple[int, ...], steps: int) -> Path:
    """The run's file."""
    return traced_run.write(
        folder,
        grid=dict(zip(("data", "z", "y", "x"), shape, strict=True)),
        schedule={"steps": steps},
        checkpoints={"every_steps": EVERY, "written_within_steps": 1},
    )


def train(folder: Path, shape: tuple[int, ...], steps: int, seed: int, kills: int) -> int:
    """4 ranks under the agent; what they end with."""
    file = write(folder, shape, steps)
    command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [
        f"--max-restarts={3 * kills}",
        "-m",
        "benchmarks.faults.kills",
        str(file),
        str(seed),
        str(kills),
    ]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with (folder / "ranks.log").open("wb") as log:
        agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            return agent.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            agent.terminate()
            agent.wait(60)
            return 124


# -- one rank ---------------------------------------------------------------------------------------------------------


def kill_of(seed: int, attempt: int, done: int) -> tuple[Fault, bool]:
    """Who is killed in an attempt that goes on behind step ``done``, and where; is it before the ranks have met?"""
    choose = random.Random(f"{seed} {attempt}")
    if choose.random() < YOUNG:
        return Fault("kill", "instant", choose.randrange(RANKS), seconds=choose.uniform(0, YOUNG_S)), True
    saves = [step for step in range(1, WINDOW + 1) if (done + step) % EVERY == 0]
    fault = random_kill(choose.randrange(1 << 30), RANKS, WINDOW, saves, run_s=2.0)
    return (replace(fault, step=done + fault.step) if fault.step else fault), False


def rank_main(file: Path, seed: int, kills: int) -> int:
    from fourfold.checkpoint.folder import open_folder
    from fourfold.checkpoint.retention import steps
    from fourfold.config.run_file import load_run
    from fourfold.drill.inject import Planted
    from fourfold.drill.injector import Injector
    from fourfold.train.run import train as train_run

    config = load_run(file)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    trace = traced_run.Trace(config, attempt)
    trace.say(begins=True)
    faults = []
    notes = traced_run.beside(config, "killed") / str(attempt)  # of what happened, and when
    if attempt < kills:
        done = max(steps(open_folder(config.checkpoints.folder)), default=0)
        fault, is_young = kill_of(seed, attempt, done)
        if is_young and fault.rank == rank:
            timer = threading.Timer(fault.seconds, Planted([fault], rank, notes).happen_once, [fault])
            timer.daemon = True
            timer.start()
        if not is_young:
            faults.append(fault)
    finished = train_run(config, [Injector(faults, spent=notes), trace])
    return 0 if finished else CONTINUE


if __name__ == "__main__":
    from fourfold.cli.main import status_of

    # As a rank of `fourfold train` ends: the agent starts it again, or not, by its status.
    sys.exit(status_of(lambda: rank_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
