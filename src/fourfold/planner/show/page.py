"""A plan as an HTML report: step times by component, memory against the limit, the map of the search space.

The report is self-contained: no script, nothing from a network. Every shape shows its values on hover.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from fourfold.planner.cost.step import Estimate
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.search import Plan
from fourfold.planner.show.charts import COLOURS, bars, document, keys
from fourfold.planner.show.tables import components, headings, percent, row_of, seconds

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
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=note>Predictions; no device has run this. {len(plan.ranked)} of {plan.considered} layouts can run.</p>",
        _table(plan, best),
        "<h2>Where the time of a step goes</h2>",
        keys(COLOURS),
        _scrolled(bars([(str(e.layout), components(e)) for e in best], COLOURS, seconds)),
        "<h2>Memory of a rank at its peak, and the limit</h2>",
        keys(_MEMORY_COLOURS),
        _scrolled(
            bars(
                [(str(e.layout), _memory(e)) for e in best],
                _MEMORY_COLOURS,
                lambda size: f"{size / 2**30:.1f} GiB",
                limit=plan.memory_limit_bytes,
            )
        ),
        "<h2>The search space</h2>",
        "<p class=note>The best step of all layouts for each number of tensor ranks (x y) and of ranks over z; darker is faster, the "
        "value is relative to the best step, a cross means that nothing fits or divides.</p>",
        _map(plan),
    ]
    if cluster.source:
        parts.append(f"<p class=note>{escape(cluster.name)}: {escape(cluster.source)}</p>")
    path.write_text(document(title, parts))


def _scrolled(picture: str) -> str:
    return f"<div class=scroll>{picture}</div>"


def _memory(estimate: Estimate) -> dict[str, float]:
    return {name: getattr(estimate.memory, f"{name}_bytes") for name in _MEMORY_COLOURS}


def _table(plan: Plan, best: Sequence[Estimate]) -> str:
    with_simulated = any(e.is_simulated for e in best)
    head = "".join(f"<th>{h}" for h in headings(plan, True, with_simulated))
    rows = "".join(
        f"<tr><td>{place}" + "".join(f"<td>{escape(cell)}" for cell in row_of(e, plan, True, with_simulated))
        for place, e in enumerate(best, 1)
    )
    return f"<div class=scroll><table><tr>{head}{rows}</table></div>"


def _map(plan: Plan) -> str:
    """The best step by tensor ranks and z."""
    cells: dict[tuple[int, int], Estimate | None] = {}
    for rejected in plan.rejected:
        cells.setdefault((rejected.layout.x * rejected.layout.y, rejected.layout.z), None)
    for estimate in reversed(plan.ranked):
        cells[estimate.layout.x * estimate.layout.y, estimate.layout.z] = estimate
    columns, rows = sorted({t for t, _ in cells}), sorted({z for _, z in cells})
    fastest = plan.best.step_s
    size, left, top = 46, 60, 28
    shapes = [f"<text x={left} y=14>tensor ranks x y</text>", f"<text x=4 y={top + 12}>z</text>"]
    for i, tensor in enumerate(columns):
        shapes.append(f"<text x={left + i * size + size / 2} y={top - 2} text-anchor=middle>{tensor}</text>")
    for j, z in enumerate(rows):
        y = top + 4 + j * size / 2
        shapes.append(f"<text x={left - 8} y={y + 15} text-anchor=end>{z}</text>")
        for i, tensor in enumerate(columns):
            if (tensor, z) not in cells:
                continue
            found, x = cells[tensor, z], left + i * size
            if found is None:
                shapes.append(f"<text x={x + size / 2} y={y + 15} text-anchor=middle opacity=.45>×</text>")
                continue
            slower = found.step_s / fastest
            shade = max(0.08, 1 / slower**1.5)
            shapes.append(
                f"<rect x={x + 1} y={y} width={size - 2} height={size / 2 - 2} fill='#4c78a8' fill-opacity={shade:.2f}>"
                f"<title>{escape(str(found.layout))}: {seconds(found.step_s)}, MFU {percent(found.mfu)}</title></rect>"
                f"<text x={x + size / 2} y={y + 15} text-anchor=middle{' class=on' if shade > 0.5 else ''}>{slower:.2f}</text>"
            )
    height = top + 12 + len(rows) * size / 2
    return f"<svg viewBox='0 0 {max(left + len(columns) * size, 700)} {height:.0f}'>{''.join(shapes)}</svg>"
