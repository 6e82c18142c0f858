"""The HTML report of a run: written at its end, and from its files at any time."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from fourfold import files
from fourfold.mesh.axes import AXES
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.show.compare import Comparison, Run, compare
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.metrics import MetricsLogger, read_metrics
from fourfold.train.observe.report_page import page
from fourfold.train.observe.run_metadata import read_run_metadata, record_start, write_run_metadata

REPORT = "report.html"
WARM_UP = 2  # lines after a start, whose steps are slower


class RunReport(MetricsLogger):
    """Writes ``run.json`` when the run starts, ``report.html`` when it ends. Put it after all other callbacks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_s = 0.0
        self._logged_s: dict[str, float] = {}

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_done:  # a run that has no steps left has its report
            super().on_start(trainer)

    def open(self, trainer: Trainer) -> None:
        self._start_s = time.perf_counter()
        record_start(self._folder, trainer)

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self._logged_s = dict(trainer.timed_s)

    def close(self, trainer: Trainer) -> None:
        metadata = read_run_metadata(self._folder)
        metadata["starts"][-1] |= {
            "until_step": trainer.step,
            "seconds": time.perf_counter() - self._start_s,
            # The last checkpoint comes after the last line.
            "unlogged_s": {what: s - self._logged_s.get(what, 0.0) for what, s in trainer.timed_s.items()},
        }
        write_run_metadata(self._folder, metadata)
        try:
            # First without the prediction, which takes a dry run; it is added if a cluster is given. Not for a run that is
            # only stopped: its ranks are wanted elsewhere.
            path = write_report(self._folder, cluster=None)
            if trainer.run.grid.cluster is not None and trainer.is_done:
                write_report(self._folder, cluster=trainer.run.grid.cluster)
            print(f"report: {path}", flush=True)
        except ValueError as reason:  # the run itself is done and saved
            print(f"no report: {reason}", flush=True)


def write_report(folder: Path, cluster: str | None) -> Path:
    """Write the report from the files of a run, with a prediction on ``cluster`` if one is given."""
    metadata, metrics = read_run_metadata(folder), read_metrics(folder)
    if not metrics:
        raise ValueError(f"{folder} has no metrics of a step yet; run at least [logging] every_steps steps")
    path = folder / REPORT
    comparison = compare_with_prediction(metadata, metrics, cluster)
    files.write_atomically(path, page(metadata, metrics, times_of(metadata, metrics), comparison))
    return path


def times_of(metadata: dict[str, Any], metrics: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of the whole run on rank 0, by part."""
    total_s: defaultdict[str, float] = defaultdict(float)
    for line in metrics:
        for part, s in parts_of(line).items():
            total_s[part] += s * line["steps"]
        for part in _BETWEEN_STEPS:
            total_s[part] += line.get(f"{part}_s", 0.0)
    for start in metadata["starts"]:
        for part in _BETWEEN_STEPS:
            total_s[part] += start.get("unlogged_s", {}).get(part, 0.0)
    known = [start["seconds"] for start in metadata["starts"] if "seconds" in start]
    if len(known) == len(metadata["starts"]):  # none of them was killed
        total_s["other"] = max(0.0, sum(known) - sum(total_s.values()))
    return dict(total_s)


def parts_of(line: dict[str, float]) -> dict[str, float]:
    """The seconds of a step: waits, and compute for the rest."""
    waits_s = {
        f"exposed {axis}": line[f"exposed_{axis}_s"] for axis in reversed(AXES) if f"exposed_{axis}_s" in line
    }
    waits_s["waiting for data"] = line.get("data_wait_s", 0.0)
    return {"compute": max(0.0, line["seconds"] - sum(waits_s.values())), **waits_s}


def compare_with_prediction(
    metadata: dict[str, Any], metrics: list[dict[str, float]], cluster: str | None
) -> Comparison | str:
    """A typical step compared with its prediction, or the reason why there is none."""
    if cluster is None:
        return "No cluster is given to predict it on: set grid.cluster in the run config, or give `fourfold report --cluster`."
    layout = Layout(**metadata["layout"])
    steps = typical_steps(metadata, metrics)
    if not steps:
        return f"There are no metrics after the first {WARM_UP} lines, whose steps are slower: nothing to compare."
    config = metadata["config"]
    run = Run(
        metadata["model"],
        layout,
        config["batch"]["tokens"] // config["data"]["sequence_length"],
        config["data"]["sequence_length"],
        config["engine"]["precision"],
        mean(line["seconds"] for line in steps),
        {part: mean(parts_of(line).get(part, 0.0) for line in steps) for part in _PARTS},
        metadata.get("compiled", False),
        config["optimizer"]["name"],
        config["engine"].get("attention", "varlen"),
        config["engine"].get("float8", "none"),
    )
    try:
        machines = clusters.load(cluster)
        if (machines.target == "cpu") != (metadata["device"] == "CPU"):
            return f"It ran on {metadata['device']}, and {machines.name} has {machines.device.name}: there is nothing to compare."
        return compare(run, machines)
    except (ValueError, OSError, RuntimeError) as error:
        return f"No prediction: {error}"


_BETWEEN_STEPS = ("evaluation", "checkpoint")
_PARTS = ("compute", *(f"exposed {axis}" for axis in reversed(AXES)))


def typical_steps(metadata: dict[str, Any], metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics since the last start, without the first ones: the middle half of these by time.

    Their means are near the medians, and unlike medians the means of the parts add up to the mean of the step.
    """
    lines = [line for line in metrics if line["step"] > metadata["starts"][-1]["step"]][WARM_UP:]
    lines.sort(key=lambda line: line["seconds"])
    quarter = len(lines) // 4
    return lines[quarter : len(lines) - quarter]
