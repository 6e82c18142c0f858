"""Parts of Fourfold's HTML reports: the document and its style, bars, curves, tiles, tables.

A report is self-contained: no script, nothing from a network. Every shape shows its values on hover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

# One colour for each component, the same in all pictures; told apart without red and green.
COLOURS = {
    "matmul": "#4c78a8",
    "attention": "#72b7b2",
    "element-wise": "#9ecae9",
    "recomputation": "#b6c3d1",
    "optimizer": "#79706e",
    "exposed x": "#f58518",
    "exposed y": "#e45756",
    "exposed z": "#b279a2",
    "exposed data": "#ff9da6",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fcfcfa; --line: #d8d8d4; --dim: #6b6b70; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #17181a; --line: #3a3b3f; --dim: #a0a0a6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 1080px; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2.2rem; }
p.note { color: var(--dim); } table { border-collapse: collapse; font-size: 13px; width: 100%; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
td:nth-child(2), th:nth-child(2), td:last-child, th:last-child { text-align: left; }
table.facts td { text-align: left; white-space: normal; vertical-align: top; overflow-wrap: anywhere; } table.facts td:first-child { color: var(--dim); white-space: nowrap; width: 1%; }
table.parts { max-width: 640px; } table.parts td, table.parts th { text-align: right; } table.parts td:first-child, table.parts th:first-child { text-align: left; } table.parts tr:last-child { font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.tiles div { border: 1px solid var(--line); border-radius: 8px; padding: .55rem .8rem; } .tiles b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; } .tiles span { color: var(--dim); font-size: 12.5px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 1.6rem; }
.narrow { display: none; } @media (max-width: 700px) { .wide { display: none; } .narrow { display: block; } }
.scroll { overflow-x: auto; } .scroll > svg { min-width: 760px; } svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg text.on { fill: #fff; } svg text.dim { fill: var(--dim); } .axis { stroke: var(--line); } .limit { stroke: var(--ink); stroke-dasharray: 5 4; }
.hover { fill: transparent; } .hover:hover { fill: var(--ink); fill-opacity: .07; }
.key { display: inline-block; margin-right: 1rem; } .key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
"""
_POINTS = 400  # of a curve at most; more are no finer on a screen
_HOVERS = 80


def document(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'><style>{_STYLE}</style><body>{body}</body></html>"
    )


def keys(colours: Mapping[str, str]) -> str:
    return "<p>" + "".join(
        f"<span class=key><i style='background:{colour}'></i>{name}</span>" for name, colour in colours.items()
    )  # fmt: skip


def tiles(figures: Mapping[str, str]) -> str:
    """The main metrics, large."""
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures.items()
    )
    return f"<div class=tiles>{cells}</div>"


def facts(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}<td>{escape(value)}" for name, value in rows.items())
    return f"<table class=facts>{cells}</table>"


def bars(
    rows: list[tuple[str, dict[str, float]]],
    colours: Mapping[str, str],
    say: Callable[[float], str],
    limit: float | None = None,
    *,
    label: int = 360,
    width: int = 1080,
) -> str:
    """Stacked bars, one below the other."""
    long_side, step = width - label - 120, 26
    longest = max([sum(parts.values()) for _, parts in rows] + ([limit] if limit else []))
    height = step * len(rows) + 8
    shapes = []
    for i, (name, parts) in enumerate(rows):
        y = 4 + i * step
        shapes.append(f"<text x={label - 8} y={y + 15} text-anchor=end>{escape(name)}</text>")
        x = float(label)
        for part, value in parts.items():
            long = value / longest * long_side
            if long > 0:
                shapes.append(
                    f"<rect x={x:.1f} y={y} width={long:.2f} height={step - 6} fill='{colours[part]}'>"
                    f"<title>{part}: {say(value)}</title></rect>"
                )
            x += long
        shapes.append(f"<text x={x + 6:.1f} y={y + 15}>{say(sum(parts.values()))}</text>")
    if limit:
        x = label + limit / longest * long_side
        shapes.append(f"<line class=limit x1={x:.1f} x2={x:.1f} y1=0 y2={height} />")
    return f"<svg viewBox='0 0 {width} {height}'>{''.join(shapes)}</svg>"


def for_any_screen(draw: Callable[[int], str], wide: int = 1040, narrow: int = 480) -> str:
    """A picture drawn twice, of which a screen shows the one whose text it can show in full size."""
    return f"<div class=wide>{draw(wide)}</div><div class=narrow>{draw(narrow)}</div>"


# -- curves over steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Points in the order of their steps; NaN and Inf are left out."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False  # single steps in the background of their mean
    has_dots: bool = False


def curves(
    given: Sequence[Curve],
    say: Callable[[float], str],
    *,
    width: int = 520,
    height: int = 220,
    from_zero: bool = False,
) -> str:
    """Curves over steps on common axes."""
    drawn = [(c, thinned([p for p in c.points if math.isfinite(p[1])])) for c in given]
    drawn = [(c, points) for c, points in drawn if points]
    if not drawn:
        return "<p class=note>No metrics.</p>"
    steps = [x for _, points in drawn for x, _ in points]
    values = [y for _, points in drawn for _, y in points]
    ticks = nice_ticks(0.0 if from_zero else min(values), max(values))
    low, high, first, last = ticks[0], ticks[-1], min(steps), max(max(steps), min(steps) + 1)
    left, right, top, bottom = 58, width - 14, 10, height - 24

    def at_x(step: float) -> float:
        return left + (step - first) / (last - first) * (right - left)

    def at_y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    shapes = []
    for tick in ticks:
        y = at_y(tick)
        shapes.append(f"<line class=axis x1={left} x2={right} y1={y:.1f} y2={y:.1f} />")
        shapes.append(f"<text class=dim x={left - 8} y={y + 4:.1f} text-anchor=end>{say(tick)}</text>")
    for tick in (t for t in nice_ticks(first, last) if first <= t <= last and t == round(t)):
        shapes.append(
            f"<text class=dim x={at_x(tick):.1f} y={height - 6} text-anchor=middle>{tick:,.0f}</text>"
        )
    for curve, points in drawn:
        line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        faint = " stroke-opacity=.35 stroke-width=1" if curve.is_faint else " stroke-width=1.8"
        shapes.append(
            f"<polyline points='{line}' fill=none stroke='{curve.colour}' stroke-linejoin=round{faint} />"
        )
        if curve.has_dots or len(points) == 1:
            shapes += [
                f"<circle cx={at_x(x):.1f} cy={at_y(y):.1f} r=2.6 fill='{curve.colour}' />" for x, y in points
            ]
    shapes += _hovers(drawn, say, at_x, top, bottom)
    return f"<svg viewBox='0 0 {width} {height}'>{''.join(shapes)}</svg>"


def _hovers(
    drawn: Sequence[tuple[Curve, list[tuple[float, float]]]],
    say: Callable[[float], str],
    at_x: Callable[[float], float],
    top: float,
    bottom: float,
) -> list[str]:
    """Columns that show the values near them on hover."""
    steps = sorted({x for _, points in drawn for x, _ in points})
    steps = steps[:: math.ceil(len(steps) / _HOVERS)]
    wide = (at_x(steps[-1]) - at_x(steps[0])) / max(1, len(steps) - 1) or 8.0
    out = []
    for step in steps:
        near = [(c.name, min(points, key=lambda p: abs(p[0] - step))) for c, points in drawn]
        words = ", ".join(f"{name} {say(y)}" for name, (_, y) in near)
        out.append(
            f"<rect class=hover x={at_x(step) - wide / 2:.1f} y={top} width={wide:.1f} height={bottom - top}>"
            f"<title>step {step:,.0f}: {escape(words)}</title></rect>"
        )
    return out


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


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that hold the range.

    Example:
        >>> nice_ticks(0.13, 0.94)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high <= low:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(f * size for f in (1, 2, 2.5, 5, 10) if f * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
