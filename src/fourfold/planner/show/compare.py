"""A run compared with its prediction: where they differ most, and which value of the cluster file would explain it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fourfold.mesh.axes import AXES
from fourfold.planner.dry_run_estimate import DryRunEstimate, Job, simulate_step, target_of
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.perturb import changed, value_of
from fourfold.planner.show.tables import seconds, signed
from fourfold.planner.workers import estimate_by_dry_run

_FURTHEST = 64.0  # times more or less than the cluster file says is looked at
_SHOWN = 0.01  # of the step: smaller gaps are not explained


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
    predicted_step_s: float
    predicted_s: dict[str, float]
    worst: str
    explanations: tuple[Explanation, ...]  # the best first; none if no value would do

    def __str__(self) -> str:
        return _show(self)


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
    )


def compare(run: Run, cluster: Cluster) -> Comparison:
    """Predict the run on the cluster, by simulation over its dry run."""
    job = Job(run.model, run.sequences, run.length, target_of(cluster), run.precision)
    return compare_estimate(run, estimate_by_dry_run(job, run.layout), cluster)


def compare_estimate(run: Run, dry_run: DryRunEstimate, cluster: Cluster) -> Comparison:
    predict = partial(parts_of, dry_run)
    predicted = predict(cluster)
    worst = max(predicted, key=lambda part: abs(run.parts_s[part] - predicted[part]))
    explanations: list[Explanation] = []
    if abs(run.parts_s[worst] - predicted[worst]) > _SHOWN * run.step_s:
        for parameter, at in _parameters(cluster, worst):
            found = _solve(predict, at, worst, run.parts_s[worst])
            if found is not None:
                left_s = sum(abs(run.parts_s[part] - s) for part, s in predict(at(found)).items())
                now = value_of(cluster, parameter)
                explanations.append(Explanation(parameter, now, now * found, left_s))
    explanations.sort(key=lambda e: e.left_s)
    return Comparison(run, cluster, sum(predicted.values()), predicted, worst, tuple(explanations))


def parts_of(dry_run: DryRunEstimate, cluster: Cluster) -> dict[str, float]:
    """Seconds that add up to the step: computation, and what shows of each axis."""
    step, _ = simulate_step(dry_run, cluster)
    return {
        "compute": step.compute_s,
        **{f"exposed {axis}": step.exposed_s.get(axis, 0.0) for axis in reversed(AXES)},
    }


# -- which number -----------------------------------------------------------------------------------------------------


def _parameters(cluster: Cluster, part: str) -> list[tuple[str, Callable[[float], Cluster]]]:
    """Numbers that a part depends on, each with the cluster in which it is multiplied by a factor."""
    names = ["best_tflops", "memory_tbps", "launch_us"]
    if part != "compute":
        names = ["node_gbps", "device_gbps", "base_us", "net_hop_us"]
    return [(name, partial(changed, cluster, name)) for name in names if value_of(cluster, name) > 0]


def _solve(
    predict: Callable[[Cluster], dict[str, float]],
    at: Callable[[float], Cluster],
    part: str,
    wanted_s: float,
) -> float | None:
    """The factor at which a part takes as long as was measured, by bisection; None if none within reach does."""

    def missing_s(factor: float) -> float:
        return predict(at(factor))[part] - wanted_s

    low, high = 1 / _FURTHEST, _FURTHEST
    at_low = missing_s(low)
    if at_low * missing_s(high) > 0:
        return None
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if missing_s(middle) * at_low > 0 else (low, middle)
    return math.sqrt(low * high)


# -- for reading ------------------------------------------------------------------------------------------------------


def _show(seen: Comparison) -> str:
    out = io.StringIO()
    console = Console(file=out, width=110)
    run = seen.run
    table = Table(title=f"{run.layout} on {seen.cluster.name}", title_justify="left")
    for heading in ("part of a step", "predicted", "measured", "gap", "of the step"):
        table.add_column(heading, justify="left" if heading == "part of a step" else "right")
    rows = {**seen.predicted_s, "other": 0.0}
    measured = {**run.parts_s, "other": max(0.0, run.step_s - sum(run.parts_s.values()))}
    for part, predicted_s in rows.items():
        if predicted_s or measured[part]:
            gap_s = measured[part] - predicted_s
            style = "bold" if part == seen.worst else None
            table.add_row(part, seconds(predicted_s), seconds(measured[part]), signed(gap_s), f"{gap_s / run.step_s:+.1%}",
                          style=style)  # fmt: skip
    gap_s = run.step_s - seen.predicted_step_s
    table.add_row("step", seconds(seen.predicted_step_s), seconds(run.step_s), signed(gap_s), f"{gap_s / run.step_s:+.1%}",
                  style="bold")  # fmt: skip
    console.print(table)
    console.print(in_words(seen), highlight=False)
    return out.getvalue()


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
