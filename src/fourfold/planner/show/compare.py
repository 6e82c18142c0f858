"""A run compared with its prediction: where they differ most, and which value of the cluster file would explain it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fourfold.mesh.axes import AXES
from fourfold.optim.kinds import Optimizer
from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.dry_run_estimate import Job, as_estimate, describe, schedule_of
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import Attention, Layout
from fourfold.planner.perturb import SECTIONS, changed, value_of
from fourfold.planner.show.tables import seconds, signed
from fourfold.planner.workers import estimate_by_dry_run
from fourfold.text_tables import as_text, table

_FURTHEST = 64.0  # times more or less than the cluster file says is looked at
HEADINGS = ("part of a step", "predicted", "measured", "gap", "share of the step")
_SHOWN = 0.01  # of the step: smaller gaps are not explained
Predict = Callable[[Cluster], Estimate]  # a run's step on any cluster


@dataclass(frozen=True)
class Run:
    """What a run measured: seconds of its median step, on one rank. `fourfold.save_run` writes it."""

    model: dict[str, Any]
    layout: Layout
    sequences: int
    length: int
    precision: str
    step_s: float
    parts_s: dict[str, float]  # compute, and exposed by axis
    compile: bool = False
    optimizer: Optimizer = "adamw"
    attention: Attention = "varlen"  # of the run config
    float8: str = "none"


@dataclass(frozen=True)
class Explanation:
    """A value of the cluster file, and what it would have to be."""

    parameter: str
    now: float
    needed: float
    left_s: float  # what all parts would still be off by


@dataclass(frozen=True)
class Comparison:
    """Prediction and measurement, part by part."""

    run: Run
    cluster: Cluster
    predicted: Estimate
    worst: str
    explanations: tuple[Explanation, ...]  # the best first; none if no value would do

    @cached_property
    def predicted_s(self) -> dict[str, float]:
        return parts_of(self.predicted)

    def parts(self) -> dict[str, tuple[float, float]]:
        """The predicted and the measured seconds of each part that takes any; they add up to the step."""
        other_s = max(0.0, self.run.step_s - sum(self.run.parts_s.values()))
        found = {part: (self.predicted_s[part], s) for part, s in self.run.parts_s.items()}
        return {part: both for part, both in {**found, "other": (0.0, other_s)}.items() if any(both)}

    def rows(self) -> list[tuple[str, ...]]:
        """The cells under `HEADINGS`."""
        total = {"step": (self.predicted.step_s, self.run.step_s)}
        return [
            (part, seconds(a), seconds(b), signed(b - a), f"{(b - a) / self.run.step_s:+.1%}")
            for part, (a, b) in (self.parts() | total).items()
        ]

    def __str__(self) -> str:
        title = f"{self.run.layout} on {self.cluster.name}"
        return as_text(110, table(title, HEADINGS, self.rows()), in_words(self))


def read_run(path: str | Path) -> Run:
    """The run in a file that `fourfold.save_run` wrote."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no run {path}; write one with fourfold.save_run after some steps")
    said = json.loads(path.read_text())
    lacking = [key for key in ("model", "layout", "sequences", "length", "measured") if key not in said]
    if lacking:
        raise ValueError(
            f"{path} lacks {len(lacking)} of 5 parts of a run: {', '.join(lacking)}; write it with fourfold.save_run"
        )
    measured = said["measured"]
    parts_s = {"compute": float(measured["compute_s"])}
    parts_s |= {f"exposed {axis}": float(measured["exposed_s"].get(axis, 0.0)) for axis in reversed(AXES)}
    return Run(
        said["model"],
        Layout(**said["layout"]),
        int(said["sequences"]),
        int(said["length"]),
        str(said.get("precision", "bf16")),
        float(measured["step_s"]),
        parts_s,
        bool(said.get("compile", False)),
        said.get("optimizer", "adamw"),
        said.get("attention", "varlen"),
        said.get("float8", "none"),
    )


def compare(run: Run, cluster: Cluster) -> Comparison:
    """Predict the run on the cluster: by simulation over its dry run, or by formulas if its blocks are compiled."""
    predict = _formulas(run, cluster.target) if run.compile else _simulation(run, cluster.target)
    return compare_with(run, predict, cluster)


def _simulation(run: Run, target: str) -> Predict:
    workload = describe(run.model)[1]
    workload = workload and workload.attended(run.attention, target, run.precision)
    attention: Attention | None = "flex" if workload is not None and workload.is_flex else None
    job = Job(
        run.model,
        run.sequences,
        run.length,
        target,
        run.precision,
        None,
        run.optimizer,
        attention,
        run.float8,
    )
    dry_run = estimate_by_dry_run(job, run.layout)
    return lambda cluster: as_estimate(dry_run, job, workload, cluster)


def _formulas(run: Run, target: str) -> Predict:
    """A dry run follows blocks operator by operator, which compiled ones do not have."""
    workload = describe(run.model)[1]
    assert workload is not None
    workload = workload.attended(run.attention, target, run.precision)

    def predict(cluster: Cluster) -> Estimate:
        schedule = schedule_of(cluster, run.precision, is_compiled=run.compile, float8=run.float8)
        prices = Prices(workload, cluster, run.length, schedule, optimizer=run.optimizer)
        return estimate_with(prices, run.layout, run.sequences)

    return predict


def compare_with(run: Run, predict: Predict, cluster: Cluster) -> Comparison:
    estimate = predict(cluster)
    predicted = parts_of(estimate)
    gaps_s = {part: run.parts_s[part] - predicted[part] for part in predicted}
    worst = max(gaps_s, key=lambda part: abs(gaps_s[part]))
    explanations: list[Explanation] = []
    # Computation depends on the device, communication on links and library.
    names = [name for name, of in SECTIONS.items() if (of == "device") == (worst == "compute")]
    for name in names if abs(gaps_s[worst]) > _SHOWN * run.step_s else ():
        now = value_of(cluster, name)

        def gap_s(factor: float, name: str = name) -> float:
            return parts_of(predict(changed(cluster, name, factor)))[worst] - run.parts_s[worst]

        factor = _solve(gap_s) if now > 0 else None
        if factor is not None:
            parts_s = parts_of(predict(changed(cluster, name, factor)))
            left_s = sum(abs(run.parts_s[part] - s) for part, s in parts_s.items())
            explanations.append(Explanation(name, now, now * factor, left_s))
    explanations.sort(key=lambda e: e.left_s)
    return Comparison(run, cluster, estimate, worst, tuple(explanations))


def parts_of(estimate: Estimate) -> dict[str, float]:
    """Seconds that add up to the step: computation, and what shows of each axis."""
    return {
        "compute": sum(estimate.compute_s.values()),
        **{f"exposed {axis}": estimate.exposed_s.get(axis, 0.0) for axis in reversed(AXES)},
    }


def _solve(gap_s: Callable[[float], float]) -> float | None:
    """The factor at which the gap is 0, by bisection; None if none within reach does it."""
    low, high = 1 / _FURTHEST, _FURTHEST
    at_low = gap_s(low)
    if at_low * gap_s(high) > 0:
        return None
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gap_s(middle) * at_low > 0 else (low, middle)
    return math.sqrt(low * high)


def in_words(seen: Comparison) -> str:
    """Where they differ most, and what would explain it."""
    run, worst = seen.run, seen.worst
    gap_s = run.parts_s[worst] - seen.predicted_s[worst]
    if abs(gap_s) <= _SHOWN * run.step_s:
        return f"No part is off by more than {_SHOWN:.0%} of the step: the cluster file describes this run."
    longer = "longer" if gap_s > 0 else "shorter"
    head = f"The worst gap is {worst}: {seconds(run.parts_s[worst])} measured, {seconds(abs(gap_s))} {longer} than predicted."
    if not seen.explanations:
        return (
            f"{head} No one number of {seen.cluster.name} explains it within {_FURTHEST:g} times what it is: the run does "
            "something that the simulation does not, such as waiting for a slow rank or for data."
        )
    first, *others = seen.explanations
    words = f"{head} {first.parameter} = {first.needed:.4g} instead of {first.now:.4g} would explain it"
    left = f"; then all parts together are off by {seconds(first.left_s)}"
    alike = [e for e in others if e.left_s <= 1.1 * first.left_s + 1e-3 * run.step_s]
    if alike:
        left += "; as well would " + ", ".join(
            f"{e.parameter} = {e.needed:.4g} instead of {e.now:.4g}" for e in alike
        )
    return f"{words}{left}."
