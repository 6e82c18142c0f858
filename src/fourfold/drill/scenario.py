"""The scenarios of a drill: faults, and the outcome that each action must have."""

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
Check = Callable[[Path, Fault], list[str]]  # of a run's folder; returns what is wrong

# -- checks ------------------------------------------------------------------------------------------------------------


def _ends_with(metric: str, value: float) -> Check:
    """All replicas skip a step or roll back together, whichever of them detected the fault."""

    def check(run: Path, fault: Fault) -> list[str]:
        lines = read_metrics(run / "logs") if (run / "logs" / METRICS).exists() else []
        found = lines[-1].get(metric) if lines else None
        return [] if found == value else [f"{metric} is {found} at the end, not {value}"]

    return check


def _names_the_straggler(run: Path, fault: Fault) -> list[str]:
    # A rank that is slow for less than that, or in a save, is not a straggler.
    lasts = fault.step == 0 or fault.step <= STEPS + 1 - INTERVALS <= STEPS < fault.step + fault.steps
    if not lasts or fault.at not in ("step", "forward", "gradients", "optimizer"):
        return []
    return _ends_with("straggler", fault.rank)(run, fault)


def _names_the_stopped_rank(run: Path, fault: Fault) -> list[str]:
    summary = run / "logs" / "hang" / "summary.txt"
    said = summary.read_text() if summary.exists() else "nothing"
    is_named = f"rank {fault.rank} never arrived" in said
    return [] if is_named else [f"rank {fault.rank} is not named: {said:.300}"]


# -- by action ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The outcome that an action must have, and what the run needs for it."""

    # Does the run continue by itself? Otherwise it has to fail, and to resume when it is restarted.
    continues: bool = False
    # Does it end exactly as the undisturbed run? Not if a step was skipped.
    exact: bool = True
    # Checks of its folder in addition.
    check: Check = lambda run, fault: []
    ranks: int = 1
    # With two, replicas differ because of it, and roll back to an earlier checkpoint.
    replicas: int = 1


EXPECTED: dict[Action, Expected] = {
    "kill": Expected(),
    "eio": Expected(),
    "enospc": Expected(),
    "stop": Expected(check=_names_the_stopped_rank, ranks=2),
    "slow": Expected(continues=True, check=_names_the_straggler, ranks=2),
    "nan": Expected(continues=True, exact=False, check=_ends_with("skipped_steps", 1)),
    "spike": Expected(continues=True, exact=False, check=_ends_with("skipped_steps", 1)),
    "flip": Expected(continues=True, check=_ends_with("rollbacks", 1), replicas=2),
}


def last_step(fault: Fault) -> int:
    """The last step of a run with this fault."""
    return max(STEPS, fault.step + 1) if fault.action == "spike" else STEPS


def check_fault(fault: Fault, ranks: int, replicas: int) -> None:
    """Reject a fault that could not happen, or could not be detected, in a drill of this size."""
    expected = EXPECTED[fault.action]
    if fault.rank >= ranks:
        raise ValueError(f"{fault} is on rank {fault.rank}, and the run has {ranks} ranks, 0 to {ranks - 1}")
    needed = 2 if fault.at == "collective" else expected.ranks
    if ranks < needed:
        raise ValueError(f"{fault} needs {needed} ranks that wait for each other, and the run has {ranks}")
    if replicas < expected.replicas:
        raise ValueError(
            f"{fault} is detected by comparing replicas, and the run has {replicas}; use grid.data={expected.replicas} or more"
        )
    if fault.action == "spike":
        if fault.step <= AT_LEAST:
            raise ValueError(
                f"{fault} would not be detected: the usual norm is known after {AT_LEAST} good steps; use "
                f"step={AT_LEAST + 1} or more"
            )
    elif fault.step > STEPS:
        raise ValueError(
            f"{fault} is in step {fault.step}, and a drill has {STEPS}; use step={STEPS} or less"
        )
    if expected.replicas > 1 and fault.step <= SAVE_EVERY:
        raise ValueError(
            f"{fault} is before step {SAVE_EVERY + 1}, and replicas that differ roll back to a checkpoint, the first of which is "
            f"at step {SAVE_EVERY}; use step={SAVE_EVERY + 1} or more"
        )


# -- scenarios ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """One fault, and the changes of the run config for it; without a fault, a file of the newest checkpoint is damaged."""

    name: str
    fault: Fault | None
    changes: tuple[str, ...] = ()


def scenario_for(fault: Fault, timeout_s: float, name: str | None = None) -> Scenario:
    changes = {
        "stop": (f"reliability.timeout_s={timeout_s:g}",),
        "slow": ("reliability.check_every_steps=2",),
        # A spike is detected against the usual norm, which takes some steps to learn.
        "spike": (f"schedule.steps={last_step(fault)}",),
    }
    return Scenario(name or str(fault), fault, changes.get(fault.action, ()))


def scenarios(ranks: int, replicas: int, seed: int, timeout_s: float) -> list[Scenario]:
    """The scenarios of a drill, on random ranks and steps; some need several ranks or replicas."""
    choose = random.Random(seed)

    def rank_and_step() -> tuple[int, int]:
        return choose.randrange(ranks), choose.randint(SAVE_EVERY + 1, STEPS - 1)

    def save_step() -> int:
        return choose.randrange(SAVE_EVERY * 2, STEPS, SAVE_EVERY)

    chosen: list[tuple[str, Fault | None]] = [
        ("a rank is killed in forward", Fault("kill", "forward", *rank_and_step())),
        ("a rank is killed in the optimizer", Fault("kill", "optimizer", *rank_and_step())),
        (
            "a rank is killed while it writes its weights",
            Fault("kill", "write", choose.randrange(ranks), save_step(), "rank-*.safetensors"),
        ),
        ("rank 0 is killed before a checkpoint has its name", Fault("kill", "rename", 0, save_step())),
        ("the disk is full", Fault("enospc", "write", choose.randrange(ranks), save_step())),
        ("a file of the newest checkpoint is damaged", None),
        ("a gradient is NaN", Fault("nan", "gradients", *rank_and_step(), seed=seed)),
    ]
    if replicas > 1:
        chosen.append(
            ("a bit of a replica's weights is flipped", Fault("flip", "step", *rank_and_step(), seed=seed))
        )
    if ranks > 1:
        chosen += [
            ("a rank is killed in a collective", Fault("kill", "collective", *rank_and_step())),
            ("a rank is slow", Fault("slow", "step", choose.randrange(ranks), 1, steps=STEPS)),
            ("a rank is stopped", Fault("stop", "forward", *rank_and_step())),
        ]
    return [
        Scenario(name, None) if fault is None else scenario_for(fault, timeout_s, name)
        for name, fault in chosen
    ]
