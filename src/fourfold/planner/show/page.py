"""A plan as an HTML report: step times by component, memory against the limit, the map of the search space.

The report is self-contained: no script, nothing from a network. Every shape shows its values on hover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.planner.cost.step import Estimate
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.search import Plan
from fourfold.planner.show.charts import COLOURS, bars, document, keys
from fourfold.planner.show.tables import components, headings, percent, row_of, seconds
from fourfold.planner.show.trace import TRACKS

if TYPE_CHECKING:
    from fourfold.planner.simulate import Simulated, Span

_MEMORY_COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#72b7b2",
    "optimizer": "#79706e",
    "activations": "#f58518",
    "gathered": "#b279a2",
    "buffers": "#ff9da6",
    "logits": "#eeca3b",
}
_TRACK_COLOURS = {
    "compute": "#4c78a8",
    "wait": "#79706e",
    "x": "#f58518",
    "y": "#e45756",
    "z": "#b279a2",
    "data": "#ff9da6",
}
_SHOWN = 12
_ZOOM = 40


def write_page(
    path: Path, plan: Plan, cluster: Cluster, title: str, timeline: Simulated | None = None
) -> None:
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
    if timeline is not None:
        parts += ["<h2>The predicted timeline of the best layout</h2>", _timeline(timeline)]
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


def _timeline(step: Simulated) -> str:
    """The whole step, and its middle zoomed."""
    middle_s, part_s = step.step_s / 2, step.step_s / _ZOOM
    return (
        _tracks(step.spans, 0.0, step.step_s)
        + f"<p class=note>Zoomed: {seconds(part_s)} in the middle of it.</p>"
        + _tracks(step.spans, middle_s - part_s / 2, middle_s + part_s / 2)
    )


def _tracks(spans: Sequence[Span], from_s: float, to_s: float) -> str:
    used = [track for track in TRACKS if any(span.track == track for span in spans)]
    left, width, height, ticks = 70, 980, 26, 5
    bottom = 4 + height * len(used)
    shapes = []
    for i in range(ticks + 1):
        x = left + width * i / ticks
        anchor = "end" if i == ticks else "middle" if i else "start"
        shapes.append(f"<line class=axis x1={x:.1f} x2={x:.1f} y1=0 y2={bottom} />")
        at = seconds(from_s + (to_s - from_s) * i / ticks)
        shapes.append(f"<text class=dim x={x:.1f} y={bottom + 14} text-anchor={anchor}>{at}</text>")
    for i, track in enumerate(used):
        y = 4 + i * height
        shapes.append(f"<text x={left - 8} y={y + 15} text-anchor=end>{track}</text>")
        seen = [s for s in spans if s.track == track and s.end_s > from_s and s.start_s < to_s]
        for span in _merged(seen, (to_s - from_s) / 2000):
            start_s, end_s = max(span.start_s, from_s), min(span.end_s, to_s)
            x = left + (start_s - from_s) / (to_s - from_s) * width
            long = (end_s - start_s) / (to_s - from_s) * width
            shapes.append(
                f"<rect x={x:.1f} y={y} width={max(long, 0.3):.2f} height={height - 6} fill='{_TRACK_COLOURS[track]}'>"
                f"<title>{escape(span.name)}: {seconds(span.end_s - span.start_s)}</title></rect>"
            )
    return f"<svg viewBox='0 0 {left + width} {bottom + 20}'>{''.join(shapes)}</svg>"


def _merged(spans: list[Span], gap_s: float) -> list[Span]:
    """Neighbours too near to be told apart become one."""
    out: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        if out and span.start_s - out[-1].end_s < gap_s:
            out[-1] = replace(out[-1], end_s=max(out[-1].end_s, span.end_s))
        else:
            out.append(span)
    return out
