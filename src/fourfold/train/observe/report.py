"""The report of a run: its facts at the start, a page at the end, and again from the files at any time."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from fourfold.mesh.axes import AXES
from fourfold.planner.dry_run_estimate import target_of
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.show.compare import Comparison, Run, compare
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged
from fourfold.train.observe.metrics import read_metrics, replace_file
from fourfold.train.observe.report_page import page
from fourfold.train.observe.run_metadata import read_facts, save_facts, write_facts

REPORT = "report.html"
WARM_UP = 2  # lines after a start that say nothing of the steps to come


class RunReport(Callback):
    """``run.json`` when the run starts, ``report.html`` when it ends. Put it behind all others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_s = 0.0
        self._writes = False
        self._logged_s: dict[str, float] = {}

    def on_start(self, trainer: Trainer) -> None:
        self._start_s = time.perf_counter()
        # A run that is done already has its report.
        self._writes = trainer.is_first and not trainer.is_done
        if self._writes:
            write_facts(self._folder, trainer)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._writes and is_logged(trainer, result.step):
            self._logged_s = dict(trainer.beside_s)

    def on_end(self, trainer: Trainer) -> None:
        if not self._writes:
            return
        facts = read_facts(self._folder)
        facts["starts"][-1] |= {
            "until_step": trainer.step,
            "seconds": time.perf_counter() - self._start_s,
            # The last checkpoint comes after the last line.
            "unlogged_s": {
                what: s - self._logged_s.get(what, 0.0)
                for what, s in trainer.beside_s.items()
                if s > self._logged_s.get(what, 0.0)
            },
        }
        save_facts(self._folder, facts)
        try:
            # At once what was measured; then, where a cluster is known, the same with the prediction, which takes a dry run.
            # Not for a run that is only stopped: somebody waits for its ranks.
            path = write_report(self._folder, cluster=None)
            if trainer.run.grid.cluster is not None and trainer.is_done:
                write_report(self._folder, cluster=trainer.run.grid.cluster)
            print(f"report: {path}", flush=True)
        except ValueError as reason:  # the run itself is done, and saved
            print(f"no report: {reason}", flush=True)


def write_report(folder: Path, cluster: str | None) -> Path:
    """The page of a run, from the files that it left; against its prediction on ``cluster``, if one is given."""
    facts, metrics = read_facts(folder), read_metrics(folder)
    if not metrics:
        raise ValueError(f"{folder} has no line of a step yet; run at least [logging] every_steps steps")
    path = folder / REPORT
    replace_file(
        path, page(facts, metrics, times_of(facts, metrics), against(facts, metrics, cluster)).encode()
    )
    return path


def times_of(facts: dict[str, Any], metrics: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of the whole run by what they went to, on rank 0."""
    total_s: defaultdict[str, float] = defaultdict(float)
    for line in metrics:
        parts_s = parts_of(line)
        for part, s in parts_s.items():
            total_s[part] += s * line["steps"]
        for part in _BESIDE:
            total_s[part] += line.get(f"{part}_s", 0.0)
    for start in facts["starts"]:
        for part in _BESIDE:
            total_s[part] += start.get("unlogged_s", {}).get(part, 0.0)
    known = [start["seconds"] for start in facts["starts"] if "seconds" in start]
    if len(known) == len(facts["starts"]):  # none of them was killed
        total_s["other"] = max(0.0, sum(known) - sum(total_s.values()))
    return dict(total_s)


def parts_of(line: dict[str, float]) -> dict[str, float]:
    """The seconds of a step: waiting, and computation for what remains."""
    waits_s = {
        f"exposed {axis}": line[f"exposed_{axis}_s"] for axis in reversed(AXES) if f"exposed_{axis}_s" in line
    }
    waits_s["waiting for data"] = line.get("data_wait_s", 0.0)
    return {"compute": max(0.0, line["seconds"] - sum(waits_s.values())), **waits_s}


def against(facts: dict[str, Any], metrics: list[dict[str, float]], cluster: str | None) -> Comparison | str:
    """The usual step held against its prediction, or the reason why there is none."""
    if cluster is None:
        return "No cluster is given to predict it on: set grid.cluster in the run's file, or give `fourfold report --cluster`."
    layout = Layout(**facts["layout"])
    steps = usual(facts, metrics)
    if not steps:
        return f"There is no line of a step after the first {WARM_UP}, which are slower: nothing to compare."
    config = facts["config"]
    run = Run(
        facts["model"],
        layout,
        config["batch"]["tokens"] // config["data"]["sequence_length"],
        config["data"]["sequence_length"],
        config["engine"]["precision"],
        mean(line["seconds"] for line in steps),
        {part: mean(parts_of(line).get(part, 0.0) for line in steps) for part in _PARTS},
    )
    try:
        machines = clusters.load(cluster)
        if (target_of(machines) == "cpu") != (facts["device"] == "CPU"):
            return f"It ran on {facts['device']}, and {machines.name} has {machines.device.name}: there is nothing to compare."
        return compare(run, machines)
    except (ValueError, OSError, RuntimeError) as error:
        return f"No prediction: {error}"


_BESIDE = ("evaluation", "checkpoint")
_PARTS = ("compute", *(f"exposed {axis}" for axis in reversed(AXES)))


def usual(facts: dict[str, Any], metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """The lines since the last start, on whose grid they were, without its first ones: of these the middle half by time.

    Their means are near the medians, and unlike those of parts and whole they add up.
    """
    lines = [line for line in metrics if line["step"] > facts["starts"][-1]["step"]][WARM_UP:]
    lines.sort(key=lambda line: line["seconds"])
    quarter = len(lines) // 4
    return lines[quarter : len(lines) - quarter]
