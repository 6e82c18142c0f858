"""The results of a bench: a table for the terminal, a page to share, and the numbers as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import quantiles
from typing import Any

from fourfold import files
from fourfold.bench.measure import WARM_UP, Bench
from fourfold.mesh.axes import AXES
from fourfold.planner.cost.step import Estimate, utilisation
from fourfold.planner.dry_run_estimate import describe
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.show.charts import Curve, curves, document, drawn, facts, tiles
from fourfold.planner.show.compare import Comparison, Run, compare
from fourfold.planner.show.tables import percent, seconds
from fourfold.text_tables import as_text, table
from fourfold.train.observe.meter import preset_by_name
from fourfold.train.observe.report_page import prediction, run_config
from fourfold.train.observe.run_metadata import amount

_HEADINGS = ("", "measured", "predicted")


class Results:
    """What was measured, and what the planner predicts for it on a cluster, if one is known."""

    def __init__(self, found: Bench, cluster: str | None) -> None:
        self.found = found
        config, self.layout = found.metadata["config"], Layout(**found.metadata["layout"])
        self.tokens, self.length = config["batch"]["tokens"], config["data"]["sequence_length"]
        self.cluster, why = _cluster_of(found.metadata, cluster)
        self.comparison: Comparison | str = why
        if self.cluster is not None:
            try:
                self.comparison = compare(self._run(config), self.cluster)
            except (ValueError, RuntimeError) as error:
                self.comparison = f"There is no prediction: {error}."

    def _run(self, config: dict[str, Any]) -> Run:
        found, engine = self.found, config["engine"]
        waits_s = {f"exposed {axis}": found.exposed_s.get(axis, 0.0) for axis in reversed(AXES)}
        return Run(
            found.metadata["model"],
            self.layout,
            self.tokens // self.length,
            self.length,
            engine["precision"],
            found.step_s,
            {"compute": max(0.0, found.step_s - sum(waits_s.values())), **waits_s},
            found.metadata["compiled"],
            config["optimizer"]["name"],
            engine["attention"],
            engine.get("float8", "none"),
        )

    @property
    def predicted(self) -> Estimate | None:
        return None if isinstance(self.comparison, str) else self.comparison.predicted

    @property
    def mfu(self) -> float | None:
        """Of the peak in the cluster's file; None if that, or the model's FLOPs, are not known."""
        if self.cluster is None:
            return None
        try:
            workload = describe(self.found.metadata["model"])[1]
        except ValueError:
            return None
        size = (float(self.tokens), self.length, self.found.step_s)
        return utilisation(workload, self.layout, self.cluster.device, *size)[0]

    def rows(self) -> list[tuple[str, str, str]]:
        """The cells under the headings measured and predicted."""
        found, said = self.found, self.predicted
        step_s, is_cpu = found.step_s, found.metadata["device"] == "CPU"
        shown: list[tuple[str, str, str]] = [
            ("tokens/s", f"{self.tokens / step_s:,.0f}", f"{said.tokens_per_s:,.0f}" if said else ""),
            (
                "tokens/s of a device",
                f"{self.tokens / step_s / self.layout.ranks:,.0f}",
                f"{said.tokens_per_s / self.layout.ranks:,.0f}" if said else "",
            ),
            ("step", seconds(step_s), seconds(said.step_s) if said else ""),
        ]
        if self.mfu is not None:
            shown.insert(2, ("MFU", percent(self.mfu), percent(said.mfu) if said else ""))
        for axis, s in found.exposed_s.items():
            planned = f"{said.exposed_s[axis] / said.step_s:.1%}" if said else ""
            shown.append((f"exposed {axis}, of the step", f"{s / step_s:.1%}", planned))
        memory = "resident memory" if is_cpu else "peak memory"
        # The prediction is of a device's memory.
        planned = _gib(said.memory.total_bytes) if said and not is_cpu else ""
        return [*shown, (memory, _gib(found.memory_bytes), planned)]

    @property
    def where(self) -> str:
        return f"{self.layout} on {self.layout.ranks} x {self.found.metadata['device']}"

    def __str__(self) -> str:
        shown = table(f"{self.found.metadata['name']}, {self.where}", _HEADINGS, self.rows())
        why = [self.comparison] if isinstance(self.comparison, str) else []
        return as_text(110, shown, self._steps(), *why)

    def _steps(self) -> str:
        low, middle, high = quantiles(self.found.seconds, n=4, method="inclusive")
        return (
            f"{len(self.found.seconds)} steps on random tokens after {WARM_UP} to warm up: median {seconds(middle)}, half of them "
            f"between {seconds(low)} and {seconds(high)}."
        )

    def page(self) -> str:
        found, rows = self.found, self.rows()
        title = f"{found.metadata['name']}, {amount(found.metadata['parameters'])} parameters, measured"
        points = [(float(i), s) for i, s in enumerate(found.seconds, WARM_UP + 1)]
        settings = run_config(found.metadata | {"data": []})
        cells = "".join("<tr><td>" + "<td>".join(map(escape, row)) for row in rows)
        both = f"<table class='parts plain'><tr><th>{'<th>'.join(_HEADINGS)}{cells}</table>"
        parts = [
            f"<h1>{escape(title)}</h1>",
            f"<p class=note>{escape(self.where)}. {escape(self._steps())}</p>",
            tiles({name: value for name, value, _ in rows if value}),
            "<h2>Measured and predicted</h2>",
            *([both] if self.predicted is not None else []),
            *prediction(self.comparison, "The median step of rank 0, with its mean waits in the last steps"),
            "<h2>Seconds of each step</h2>",
            drawn("steps", curves([Curve("seconds", "#4c78a8", points)], ".3~g", from_zero=True)),
            "<h2>The run</h2>",
            facts({name: settings[name] for name in _SETTINGS}),
        ]
        return document(title, parts)

    def as_json(self) -> dict[str, Any]:
        said = self.predicted
        return {
            **asdict(self.found),
            "step_s": self.found.step_s,
            "tokens_per_s": self.tokens / self.found.step_s,
            "mfu": self.mfu,
            "predicted": said
            and {
                "cluster": self.cluster and self.cluster.name,
                "step_s": said.step_s,
                "tokens_per_s": said.tokens_per_s,
                "mfu": said.mfu,
                "exposed_s": said.exposed_s,
                "memory_bytes": said.memory.total_bytes,
            },
        }

    def write(self, path: Path) -> None:
        """The page, and beside it the numbers."""
        files.write_atomically(path.with_suffix(".json"), json.dumps(self.as_json(), indent=1, default=str))
        files.write_atomically(path, self.page())


_SETTINGS = ("model", "grid", "batch", "precision", "optimizer", "versions")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _cluster_of(metadata: dict[str, Any], given: str | None) -> tuple[Cluster | None, str]:
    """The cluster to predict for, or the reason why there is none."""
    name = given or preset_by_name(metadata["device"])
    if name is None:
        return None, (
            f"There is no preset with {metadata['device']} to predict for: give --cluster with a file that `fourfold calibrate` wrote."
        )
    found = clusters.load(name)
    if (found.target == "cpu") != (metadata["device"] == "CPU"):
        return None, f"It ran on {metadata['device']}, and {found.name} has {found.device.name}."
    return found, ""
