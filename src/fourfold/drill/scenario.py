"""What a drill disturbs, and what has to come of it: one table by action, for faults that are drawn and those that are given."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fourfold.drill.fault import Action, Fault
from fourfold.train.observe.metrics import METRICS, read_metrics
from fourfold.train.resilience.bad_steps import AT_LEAST
from fourfold.train.resilience.stragglers import INTERVALS

STEPS, SAVE_EVERY = 8, 2

# -- what the folder of a run has to show; what is wrong, in words -----------------------------------------------------


def _nothing(run: Path, fault: Fault) -> list[str]:
    return []


def _left_out(run: Path, fault: Fault) -> list[str]:
    """A step was left out, by all replicas, whichever of them saw it."""
    skipped = _at_the_end(run, "skipped_steps")
    return [] if skipped == 1 else [f"skipped_steps is {skipped} at the end, not 1"]


def _went_back(run: Path, fault: Fault) -> list[str]:
    found = _at_the_end(run, "rollbacks")
    return [] if found == 1 else [f"rollbacks is {found} at the end, not 1"]


def _names_the_slow(run: Path, fault: Fault) -> list[str]:
    # Who is slow for less than that, or in a save, is not to be named.
    lasts = fault.step == 0 or fault.step <= STEPS + 1 - INTERVALS <= STEPS < fault.step + fault.steps
    if not lasts or fault.at not in ("step", "forward", "gradients", "optimizer"):
        return []
    found = _at_the_end(run, "straggler")
    return [] if found == fault.rank else [f"straggler is {found} at the end, not {fault.rank}"]


def _names_the_stopped(run: Path, fault: Fault) -> list[str]:
    summary = run / "logs" / "hang" / "summary.txt"
    said = summary.read_text() if summary.exists() else "nothing"
    return (
        [] if f"rank {fault.rank} never arrived" in said else [f"rank {fault.rank} is not named: {said:.300}"]
    )


def _at_the_end(run: Path, name: str) -> float | None:
    lines = read_metrics(run / "logs") if (run / "logs" / METRICS).exists() else []
    return lines[-1].get(name) if lines else None


# -- by action ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What is to come of an action, and what a run needs for it."""

    # Does the run go on by itself? Otherwise it is to fail, and to go on when it is started again.
    goes_on: bool = False
    # Is its end that of the undisturbed run? Not if a step was left out.
    exact: bool = True
    # What its folder has to show beside that.
    shows: Callable[[Path, Fault], list[str]] = _nothing
    # Of the run's file, for this alone, given the time-out of the drill.
    changes: Callable[[Fault, float], tuple[str, ...]] = lambda fault, timeout_s: ()
    ranks: int = 1
    replicas: int = 1
    # Do replicas differ by it, and go back to a checkpoint from before?
    goes_back: bool = False


EXPECTED: dict[Action, Expected] = {
    "kill": Expected(),
    "eio": Expected(),
    "enospc": Expected(),
    "stop": Expected(
        shows=_names_the_stopped,
        changes=lambda fault, timeout_s: (f"reliability.timeout_s={timeout_s:g}",),
        ranks=2,
    ),
    "slow": Expected(
        goes_on=True,
        shows=_names_the_slow,
        changes=lambda fault, timeout_s: ("reliability.check_every_steps=2",),
        ranks=2,
    ),
    "nan": Expected(goes_on=True, exact=False, shows=_left_out),
    "spike": Expected(
        goes_on=True,
        exact=False,
        shows=_left_out,
        # It is far from what is usual, which has to be known first.
        changes=lambda fault, timeout_s: (f"schedule.steps={last_step(fault)}",),
    ),
    "flip": Expected(goes_on=True, shows=_went_back, replicas=2, goes_back=True),
}


def last_step(fault: Fault) -> int:
    """Of a run with this fault."""
    return max(STEPS, fault.step + 1) if fault.action == "spike" else STEPS


def refuse(fault: Fault, ranks: int, replicas: int) -> None:
    """Refuse a fault that could not happen in a drill of so many ranks, or that nobody could see there."""
    expected = EXPECTED[fault.action]
    if fault.rank >= ranks:
        raise ValueError(f"{fault} is of rank {fault.rank}, and the run has {ranks} ranks, 0 to {ranks - 1}")
    needed = 2 if fault.at == "collective" else expected.ranks
    if ranks < needed:
        raise ValueError(f"{fault} needs {needed} ranks that wait for each other, and the run has {ranks}")
    if replicas < expected.replicas:
        raise ValueError(
            f"{fault} is seen by replicas that differ, and the run has {replicas}; use grid.data={expected.replicas} or more"
        )
    if fault.action == "spike":
        if fault.step <= AT_LEAST:
            raise ValueError(
                f"{fault} would not be seen: what is usual is known after {AT_LEAST} good steps; use "
                f"step={AT_LEAST + 1} or more"
            )
    elif fault.step > STEPS:
        raise ValueError(
            f"{fault} is in step {fault.step}, and a drill has {STEPS}; use step={STEPS} or less"
        )
    if expected.goes_back and replicas > 1 and fault.step <= SAVE_EVERY:
        raise ValueError(
            f"{fault} is before step {SAVE_EVERY + 1}, and replicas that differ go back to a checkpoint, of which the first is "
            f"of step {SAVE_EVERY}; use step={SAVE_EVERY + 1} or more"
        )


# -- exercises ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """One disturbance, and what is to come of it; no fault: a file of the newest checkpoint is damaged."""

    name: str
    fault: Fault | None
    expected: Expected = Expected()
    changes: tuple[str, ...] = ()


def exercise_of(fault: Fault, timeout_s: float, name: str | None = None) -> Scenario:
    expected = EXPECTED[fault.action]
    return Scenario(name or str(fault), fault, expected, expected.changes(fault, timeout_s))


def exercises(ranks: int, replicas: int, seed: int, timeout_s: float) -> list[Scenario]:
    """What is disturbed, on drawn ranks in drawn steps; without other ranks nobody can wait for one."""
    choose = random.Random(seed)

    def somewhere() -> tuple[int, int]:
        return choose.randrange(ranks), choose.randint(SAVE_EVERY + 1, STEPS - 1)

    def saving() -> int:
        return choose.randrange(SAVE_EVERY * 2, STEPS, SAVE_EVERY)

    drawn: list[tuple[str, Fault | None]] = [
        ("a rank is killed in forward", Fault("kill", "forward", *somewhere())),
        ("a rank is killed in the optimizer", Fault("kill", "optimizer", *somewhere())),
        (
            "a rank is killed while it writes its weights",
            Fault("kill", "write", choose.randrange(ranks), saving(), "rank-*.safetensors"),
        ),
        ("rank 0 is killed before a checkpoint has its name", Fault("kill", "rename", 0, saving())),
        ("the disk is full", Fault("enospc", "write", choose.randrange(ranks), saving())),
        ("a file of the newest checkpoint is damaged", None),
        ("a gradient is no number", Fault("nan", "gradients", *somewhere(), seed=seed)),
    ]
    if replicas > 1:
        drawn.append(
            ("a bit of a replica's weights is flipped", Fault("flip", "step", *somewhere(), seed=seed))
        )
    if ranks > 1:
        drawn += [
            ("a rank is killed in a collective", Fault("kill", "collective", *somewhere())),
            ("a rank is slow", Fault("slow", "step", choose.randrange(ranks), 1, steps=STEPS)),
            ("a rank is stopped", Fault("stop", "forward", *somewhere())),
        ]
    return [
        Scenario(name, None) if fault is None else exercise_of(fault, timeout_s, name)
        for name, fault in drawn
    ]
