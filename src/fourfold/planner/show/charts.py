"""Parts of Fourfold's HTML reports: the document and its style, tiles, tables, and charts drawn by plotly.

A report is self-contained: nothing comes from a network. Charts show their values on hover, fit the width of the screen, and
take the colours of text and lines from the page, so that they can be read in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from itertools import accumulate
from typing import Any

# One colour for each component, the same in all pictures; told apart without red and green.
COLOURS = {
    "matmul": "#4c78a8",
    "attention": "#72b7b2",
    "element-wise": "#9ecae9",
    "recomputation": "#b6c3d1",
    "optimizer": "#79706e",
    "host copies": "#d4a6c8",
    "exposed x": "#f58518",
    "exposed y": "#e45756",
    "exposed z": "#b279a2",
    "exposed data": "#ff9da6",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fcfcfa; --line: #d8d8d4; --dim: #6b6b70; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #17181a; --line: #3a3b3f; --dim: #a0a0a6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2.2rem; }
p.note { color: var(--dim); } table { border-collapse: collapse; font-size: 13px; width: 100%; } .scroll { overflow-x: auto; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
td.text, th.text { text-align: left; }
table.facts td { text-align: left; white-space: normal; vertical-align: top; overflow-wrap: anywhere; } table.facts td:first-child { color: var(--dim); white-space: nowrap; width: 1%; }
table.parts { max-width: 640px; } table.parts td:first-child, table.parts th:first-child { text-align: left; } table.parts:not(.plain) tr:last-child { font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.tiles div { border: 1px solid var(--line); border-radius: 8px; padding: .55rem .8rem; } .tiles b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; } .tiles span { color: var(--dim); font-size: 12.5px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.6rem; } .pair > div { min-width: 0; } @media (max-width: 700px) { .pair { grid-template-columns: 1fr; } }
.xtick text, .ytick text, .legendtext, .annotation-text, .xtitle, .ytitle { fill: var(--ink) !important; }
.crisp { stroke: var(--line) !important; } .shapelayer path { stroke: var(--ink) !important; }
"""
_POINTS = 400  # of a curve at most; more are no finer on a screen


def document(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'><style>{_STYLE}</style>"
        f"<script>{_plotly('offline').get_plotlyjs()}</script><body>{body}</body></html>"
    )


def _plotly(module: str) -> Any:
    try:
        return import_module(f"plotly.{module}")
    except ImportError:
        raise ValueError(
            "an HTML report is drawn by plotly, which is not installed; pip install 'fourfold[plots]'"
        ) from None


def tiles(figures: Mapping[str, str]) -> str:
    """The main metrics, large."""
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures.items()
    )
    return f"<div class=tiles>{cells}</div>"


def facts(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}<td>{escape(value)}" for name, value in rows.items())
    return f"<table class=facts>{cells}</table>"


# -- charts: dicts as plotly takes them -------------------------------------------------------------------------------


def drawn(name: str, chart: Mapping[str, Any]) -> str:
    """A chart in the document; ``name`` is its own in the document."""
    config = {"displayModeBar": False, "responsive": True}
    html: str = _plotly("io").to_html(
        dict(chart), config=config, include_plotlyjs=False, full_html=False, validate=False, div_id=name
    )
    return html


def _chart(data: list[dict[str, Any]], height: int, **layout: Any) -> dict[str, Any]:
    clear, axis = "rgba(0,0,0,0)", {"automargin": True, "zeroline": False, "fixedrange": True}
    return {
        "data": data,
        "layout": {
            "height": height,
            "paper_bgcolor": clear,
            "plot_bgcolor": clear,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
            **layout,
            "xaxis": axis | layout.get("xaxis", {}),
            "yaxis": axis | layout.get("yaxis", {}),
        },
    }


def bars(
    rows: list[tuple[str, dict[str, float]]],
    colours: Mapping[str, str],
    say: Callable[[float], str],
    limit: float | None = None,
) -> dict[str, Any]:
    """Stacked bars, one below the other, with their sums, and a line at the limit."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "marker": {"color": colour},
            "y": [label for label, _ in rows],
            "x": [parts.get(part, 0.0) for _, parts in rows],
            "customdata": [say(parts.get(part, 0.0)) for _, parts in rows],
            "hovertemplate": "%{customdata}",
        }
        for part, colour in colours.items()
        if any(parts.get(part) for _, parts in rows)
    ]
    sums = [(label, sum(parts.values())) for label, parts in rows]
    notes = [
        {"x": total, "y": label, "text": f" {say(total)}", "xanchor": "left", "showarrow": False}
        for label, total in sums
    ]
    lines = [
        {"x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash", "width": 1}}
    ]
    # Room for the sums at the right.
    longest = 1.25 * max([total for _, total in sums] + ([limit] if limit else []))
    return _chart(
        data,
        90 + 34 * len(rows),
        barmode="stack",
        annotations=notes,
        shapes=lines if limit else [],
        xaxis={"range": [0, longest], "visible": False},
        yaxis={"autorange": "reversed"},
    )


def heat_map(
    columns: tuple[str, Sequence[int]],
    rows: tuple[str, Sequence[int]],
    cells: Mapping[tuple[int, int], tuple[float, str, str]],
) -> dict[str, Any]:
    """Shades from 0 to 1, each with a word in it and one on hover, by (column, row); the others are crossed out."""
    (of_columns, xs), (of_rows, ys) = columns, rows
    table = [[cells.get((x, y), (None, "", "")) for x in xs] for y in ys]
    shades, words, hovers = ([[cell[i] for cell in row] for row in table] for i in range(3))
    text = {
        "text": words,
        "texttemplate": "%{text}",
        "customdata": hovers,
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    look = {
        "colorscale": [[0, "#dfe7f0"], [1, "#4c78a8"]],
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    names = {"x": [str(x) for x in xs], "y": [str(y) for y in ys]}
    crosses = [(str(x), str(y)) for x in xs for y in ys if (x, y) not in cells]
    cross = {"symbol": "x-thin-open", "size": 6, "color": "#909096"}
    none = {"x": [x for x, _ in crosses], "y": [y for _, y in crosses], "mode": "markers", "marker": cross}
    data = [
        {"type": "heatmap", "z": shades, **names, **text, **look},
        {"type": "scatter", **none, "hoverinfo": "skip", "showlegend": False},
    ]
    axes = [{"type": "category", "title": {"text": of}, "showgrid": False} for of in (of_columns, of_rows)]
    return _chart(
        data, 90 + 26 * len(ys), xaxis=axes[0] | {"side": "top"}, yaxis=axes[1] | {"autorange": "reversed"}
    )


@dataclass(frozen=True)
class Curve:
    """Points in the order of their steps; NaN and Inf are left out."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False  # single steps in the background of their mean
    has_dots: bool = False


def curves(
    given: Sequence[Curve], form: str, *, height: int = 220, from_zero: bool = False
) -> dict[str, Any]:
    """Curves over steps on common axes; ``form`` is d3's format of a value."""
    data = []
    for curve in given:
        points = thinned([p for p in curve.points if math.isfinite(p[1])])
        data.append(
            {
                "type": "scatter",
                "name": curve.name,
                "mode": "lines+markers" if curve.has_dots or len(points) == 1 else "lines",
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "line": {"color": curve.colour, "width": 1 if curve.is_faint else 2},
                "opacity": 0.35 if curve.is_faint else 1.0,
                "hovertemplate": f"%{{y:{form}}}",
            }
        )
    steps = [x for curve in given for x, _ in curve.points]
    ticks: dict[str, Any] = {"tickformat": ",d"}
    if steps and max(steps) - min(steps) < 10:  # plotly would put some between two steps
        ticks["dtick"] = 1
    values = {"tickformat": form, "rangemode": "tozero" if from_zero else "normal"}
    return _chart(
        data,
        height,
        hovermode="x unified",
        showlegend=len(given) > 1,
        xaxis=ticks,
        yaxis=values,
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_POINTS` points: means of neighbours, with the first and the last unchanged."""
    if len(points) <= _POINTS:
        return list(points)
    size = math.ceil(len(points) / _POINTS)
    groups = [points[i : i + size] for i in range(1, len(points) - 1, size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [points[0], *means, points[-1]]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each with the mean of its neighbours, a hundredth of all on each side; before it and after, so that nothing lags."""
    finite = [p for p in points if math.isfinite(p[1])]
    sums = [0.0, *accumulate(y for _, y in finite)]
    reach = max(2, len(finite) // 100)
    out = []
    for i, (x, _) in enumerate(finite):
        near = min(reach, i, len(finite) - 1 - i)
        out.append((x, (sums[i + near + 1] - sums[i - near]) / (2 * near + 1)))
    return out
