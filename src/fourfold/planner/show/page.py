"""A plan as an HTML report: step times by component, memory against the limit, the map of the search space."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fourfold.planner.cost.step import Estimate
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.search import Plan
from fourfold.planner.show.charts import COLOURS, bars, document, drawn, heat_map
from fourfold.planner.show.tables import TEXT, components, headings, percent, row_of, seconds

_MEMORY_COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#72b7b2",
    "optimizer": "#79706e",
    "activations": "#f58518",
    "gathered": "#b279a2",
    "buffers": "#ff9da6",
    "logits": "#eeca3b",
}
_SHOWN = 12


def write_page(path: Path, plan: Plan, cluster: Cluster, title: str) -> None:
    best = plan.ranked[:_SHOWN]
    labelled = {
        f"{place}: {e.layout.grid}": e for place, e in enumerate(best, 1)
    }  # settings are in the table
    times = [(label, components(e)) for label, e in labelled.items()]
    memory = [(label, _memory(e)) for label, e in labelled.items()]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=note>Predictions; no device has run this. {len(plan.ranked)} of {plan.considered} layouts can run.</p>",
        _table(plan, best),
        "<h2>Where the time of a step goes</h2>",
        drawn("times", bars(times, COLOURS, seconds)),
        "<h2>Memory of a rank at its peak, and the limit</h2>",
        drawn("memory", bars(memory, _MEMORY_COLOURS, _gib, plan.memory_limit_bytes)),
        "<h2>The search space</h2>",
        "<p class=note>The best step of all layouts for each number of tensor ranks (x y) and of ranks over z, relative to the best of "
        "all; darker is faster. A cross: nothing fits or divides, or nothing was tried.</p>",
        drawn("space", _map(plan)),
    ]
    if cluster.source:
        parts.append(f"<p class=note>{escape(cluster.name)}: {escape(cluster.source)}</p>")
    path.write_text(document(title, parts))


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _memory(estimate: Estimate) -> dict[str, float]:
    return {name: getattr(estimate.memory, f"{name}_bytes") for name in _MEMORY_COLOURS}


def _table(plan: Plan, best: Sequence[Estimate]) -> str:
    columns = headings(plan, with_simulated=any(e.is_simulated for e in best))
    marks = [" class=text" if heading in TEXT else "" for heading in columns]
    table = [columns, *(row_of(place, e, columns) for place, e in enumerate(best, 1))]
    rows = (
        "".join(f"<td{mark}>{escape(cell)}" for mark, cell in zip(marks, row, strict=True)) for row in table
    )
    return f"<div class=scroll><table><tr>{'<tr>'.join(rows)}</table></div>"


def _map(plan: Plan) -> dict[str, Any]:
    """The best step by tensor ranks and z."""
    layouts = [e.layout for e in plan.ranked] + [r.layout for r in plan.rejected]
    tried = {(layout.x * layout.y, layout.z) for layout in layouts}
    cells = {}
    for e in reversed(plan.ranked):
        slower = e.step_s / plan.best.step_s
        about = f"{e.layout}: {seconds(e.step_s)}, MFU {percent(e.mfu)}"
        cells[e.layout.x * e.layout.y, e.layout.z] = (slower**-1.5, f"{slower:.2f}", about)
    columns, rows = sorted({t for t, _ in tried}), sorted({z for _, z in tried})
    return heat_map(("tensor ranks, x y", columns), ("z", rows), cells)
