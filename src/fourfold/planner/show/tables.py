"""A plan as text: the ranked table, why one layout beats another, single answers about it; and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from fourfold.mesh.axes import AXES
from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.search import Plan
from fourfold.text_tables import as_text, table

# Each axis with the name that users of other software know it by.
_GRID = ("data\nDP", "z\nFSDP", "y\nTP2", "x\nTP")
TEXT = ("settings", "limited by")  # columns that are not numbers
_WIDE = 120  # columns of a terminal that show what limits a step


def show_plan(plan: Plan, cluster: Cluster, title: str, rows: int = 10, width: int = 150) -> str:
    """The fastest layouts, and why the others are not there."""
    shown = plan.ranked[:rows]
    columns = headings(plan, with_simulated=any(e.is_simulated for e in shown))
    columns = columns if width >= _WIDE else columns[:-1]
    ranked = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in columns:
        ranked.add_column(
            heading,
            justify="left" if heading in TEXT else "right",
            no_wrap=heading not in TEXT,
            vertical="top",
        )
    for place, estimate in enumerate(shown, 1):
        ranked.add_row(*row_of(place, estimate, columns))
    notes = [f"{len(plan.ranked)} of {plan.considered} layouts can run on {plan.ranks} ranks."]
    for reason, count in Counter(_kind_of(r.reason) for r in plan.rejected).most_common(6):
        example = min((r for r in plan.rejected if _kind_of(r.reason) == reason), key=lambda r: r.over_bytes)
        notes.append(f"  {count} cannot: {reason}. {example.layout}: {example.reason}")
    if cluster.assumed:
        notes.append(f"Not known for {cluster.name}, so defaults are used: {', '.join(cluster.assumed)}.")
    return as_text(width, f"{title}: predictions, no device has run this", ranked, *notes, *plan.notes)


def headings(plan: Plan, *, with_simulated: bool) -> list[str]:
    """Of the columns of a table of layouts."""
    steps = ["step", "by\nformula"] if with_simulated else ["step"]
    memory = f"GiB of\n{plan.memory_limit_bytes / 2**30:.0f}"
    return ["", *_GRID, "settings", *steps, "tokens/s", "MFU", memory, "exposed\nx, y, z, data", "limited by"]


def row_of(place: int, estimate: Estimate, columns: Sequence[str]) -> list[str]:
    e = estimate
    steps = [seconds(e.step_s)]
    if "by\nformula" in columns:
        steps = [seconds(e.step_s), seconds(e.formula_s)] if e.is_simulated and e.formula_s else ["", *steps]
    shares = ", ".join(f"{e.exposed_s[axis] / e.step_s:.0%}" for axis in reversed(AXES))
    held = f"{e.memory.total_bytes / 2**30:.1f}"
    cells = [
        str(place),
        *map(str, e.layout.grid),
        e.layout.extras,
        *steps,
        f"{e.tokens_per_s:,.0f}",
        percent(e.mfu),
    ]
    return [*cells, held, shares, e.limited_by][: len(columns)]


def explain(a: Estimate, b: Estimate) -> str:
    """Why one layout is faster than another, component by component."""
    parts_a, parts_b = components(a), components(b)
    gaps_s = {name: parts_b[name] - parts_a[name] for name in parts_a}
    shown = [name for name in gaps_s if parts_a[name] or parts_b[name]]
    rows = [
        (name, seconds(parts_a[name]), seconds(parts_b[name]), signed(gaps_s[name]))
        for name in sorted(shown, key=lambda name: -abs(gaps_s[name]))
    ]
    gap_s = b.step_s - a.step_s
    rows.append(("step", seconds(a.step_s), seconds(b.step_s), signed(gap_s)))
    most = max(gaps_s, key=lambda name: gaps_s[name] * (1 if gap_s >= 0 else -1))
    winner, loser = ("A", "B") if gap_s >= 0 else ("B", "A")
    words = [
        f"{winner} is {max(a.step_s, b.step_s) / min(a.step_s, b.step_s):.2f} x faster than {loser}, most of it in {most}; "
        f"memory {a.memory.total_bytes / 2**30:.1f} and {b.memory.total_bytes / 2**30:.1f} GiB."
    ]
    if a.is_simulated != b.is_simulated:
        words.append(
            "One is simulated and the other by formula: simulate more layouts to compare them by one measure."
        )
    return as_text(130, table(f"A {a.layout}\nB {b.layout}", ("component", "A", "B", "B - A"), rows), *words)


def components(estimate: Estimate) -> dict[str, float]:
    """Seconds that add up to the step."""
    return {**estimate.compute_s, **{f"exposed {axis}": estimate.exposed_s[axis] for axis in reversed(AXES)}}


def speedups(plan: Plan) -> list[str]:
    """What the second tensor axis is worth, and sequence-parallel activations where both kinds were tried.

    A simulated time is not compared with one by formulas.
    """
    best = plan.best
    y = best.layout.y
    without_y = next((e for e in plan.ranked if (e.layout.y > 1) != (y > 1)), None)
    said = []
    if without_y is None:
        none = "The best layout has y = 1, and none with y > 1 can run."
        said = [none if y == 1 else f"No layout with y = 1 can run; the best has y = {y}."]
    elif without_y.is_simulated == best.is_simulated:
        kinds = "The best layout has y = 1; the best with y > 1"
        if y > 1:
            kinds = f"y = {y} is faster here: the best layout without it"
        said = [f"{kinds}, {_slower(without_y, best)}"]
    other = next((e for e in plan.ranked if e.layout.by_tokens != best.layout.by_tokens), None)
    if other is not None and other.is_simulated == best.is_simulated:
        kinds = "The best layout has replicated activations; the best with sequence-parallel ones"
        if best.layout.by_tokens:
            kinds = "Sequence-parallel activations are faster here: the best without them"
        said.append(f"{kinds}, {_slower(other, best)}")
    return said


def _slower(other: Estimate, best: Estimate) -> str:
    return f"{other.layout}, takes {other.step_s / best.step_s:.3f} x as long."


def budget(
    estimate: Estimate, tokens: float, *, price_per_hour: float | None = None, watts: float | None = None
) -> str:
    """What N tokens take: time, and money and energy where a device's are given."""
    hours = tokens / estimate.tokens_per_s / 3600
    device_hours = hours * estimate.layout.ranks
    words = [
        f"{tokens:.3g} tokens take at least {hours:,.1f} hours, {device_hours:,.0f} device hours, at the predicted speed"
    ]
    if price_per_hour is not None:
        words.append(f"{device_hours * price_per_hour:,.0f} at {price_per_hour:g} per device hour")
    if watts is not None:
        words.append(f"{device_hours * watts / 1e6:,.1f} MWh at {watts:g} W a device")
    return "; ".join(words)


def pick_layout(text: str, plan: Plan, prices: Prices, sequences: int) -> Estimate:
    """A layout by its row in the table, or by its grid."""
    if text.isdigit():
        row = int(text)
        if not 1 <= row <= len(plan.ranked):
            raise ValueError(f"there is no layout number {row}; the table has 1 to {len(plan.ranked)}")
        return plan.ranked[row - 1]
    try:
        data, z, y, x = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a layout; give its number in the table, or DATA,Z,Y,X") from None
    found = next((e for e in plan.ranked if e.layout.grid == (data, z, y, x)), None)
    if found is not None:
        return found
    reason = next((r.reason for r in plan.rejected if r.layout.grid == (data, z, y, x)), None)
    if reason is None:
        raise ValueError(f"{text} is not a grid of {plan.ranks} ranks; the product has to be {plan.ranks}")
    print(f"{text} cannot run: {reason}")
    return estimate_with(prices, Layout(data, z, y, x, activation_checkpointing="full"), sequences)


def as_json(plan: Plan, title: str) -> dict[str, Any]:
    """All estimates of a plan."""
    return {
        "title": title,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "considered": plan.considered,
        "notes": plan.notes,
        "ranked": [{**asdict(e), "limited_by": e.limited_by} for e in plan.ranked],
        "rejected": [asdict(r) for r in plan.rejected],
    }


def _kind_of(reason: str) -> str:
    if reason.startswith("needs"):
        return "too large for the memory"
    if reason.startswith("the dry run"):
        return "rejected by the dry run"
    if "in float8" in reason:
        return "features of a matmul are not a multiple of 16, as float8 needs them"
    what, _, whom = reason.partition(" does not divide ")
    if not whom:
        what, _, whom = reason.partition(" is not a multiple of ")
        return f"{what.split('=')[0]} is not a multiple of {whom.split('=')[0]}"
    return f"{what.split('=')[0]} does not divide {whom.split('=')[0].split(' of ')[0]}"


def seconds(value: float) -> str:
    """
    Example:
        >>> seconds(0.0123)
        '12.3 ms'
    """
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def signed(value: float) -> str:
    return ("+" if value >= 0 else "-") + seconds(abs(value))


def percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
