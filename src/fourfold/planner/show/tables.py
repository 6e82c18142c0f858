"""A plan as text: the ranked table, why one layout beats another, the speedup of y, the cost of a budget of tokens."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from fourfold.mesh.axes import AXES
from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.perturb import changed
from fourfold.planner.search import Plan

_WIDE = 170  # columns of a terminal from which on every figure has one


def show_plan(plan: Plan, cluster: Cluster, title: str, rows: int = 10, width: int = 150) -> str:
    """The fastest layouts, and why the others are not there."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    shown = plan.ranked[:rows]
    is_wide = width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings(plan, is_wide, any(e.is_simulated for e in shown)):
        is_text = heading in ("layout", "layout (data, z, y, x)", "limited by")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for place, estimate in enumerate(shown, 1):
        table.add_row(str(place), *row_of(estimate, plan, is_wide, any(e.is_simulated for e in shown)))
    console.print(f"[bold]{title}[/bold]: predictions, no device has run this")
    console.print(table)
    if not is_wide:
        console.print(
            "layout: data,z,y,x; m4: 4 micro-batches; T: token-sharded activations, t: with inputs gathered again; "
            "R: activations recomputed; K: weights kept"
        )
    console.print(f"{len(plan.ranked)} of {plan.considered} layouts can run on {plan.ranks} ranks.")
    for reason, count in Counter(_kind_of(r.reason) for r in plan.rejected).most_common(6):
        example = next(r for r in plan.rejected if _kind_of(r.reason) == reason)
        console.print(f"  {count} cannot: {reason}. {example.layout}: {example.reason}")
    if cluster.assumed:
        console.print(f"No source gave {', '.join(cluster.assumed)} of {cluster.name}: defaults were taken.")
    for note in plan.notes:
        console.print(note)
    return out.getvalue()


def headings(plan: Plan, is_wide: bool, with_simulated: bool) -> list[str]:
    """Headings of the columns of `row_of`, after one for the rank."""
    both = ["step", "by formula"] if with_simulated else ["step"]
    if is_wide:
        return ["", "layout (data, z, y, x)", *both, "tokens/s", "MFU", "HFU", "memory / limit", "exposed x, y, z, data",
                "limited by"]  # fmt: skip
    memory = f"GiB of {plan.memory_limit_bytes / 2**30:.0f}"
    return ["", "layout", *both, "tokens/s", "MFU", memory, "exposed x,y,z,data", "limited by"]


def row_of(estimate: Estimate, plan: Plan, is_wide: bool = True, with_simulated: bool = False) -> list[str]:
    e = estimate
    shares = [f"{e.exposed_s[axis] / e.step_s:.0%}" for axis in reversed(AXES)]
    steps = [seconds(e.step_s)]
    if with_simulated:
        steps = [seconds(e.step_s), seconds(e.formula_s)] if e.is_simulated and e.formula_s else ["", *steps]
    held_gib, limit_gib = e.memory.total_bytes / 2**30, plan.memory_limit_bytes / 2**30
    if not is_wide:
        limited_by = e.limited_by.replace(" communication", " comm.")
        return [e.layout.short, *steps, f"{e.tokens_per_s:,.0f}", percent(e.mfu), f"{held_gib:.1f}", ",".join(shares),
                limited_by]  # fmt: skip
    return [", ".join(filter(None, [str(e.layout.grid), e.layout.extras])), *steps, f"{e.tokens_per_s:,.0f}", percent(e.mfu), percent(e.hfu),
            f"{held_gib:.1f} / {limit_gib:.1f} GiB", ", ".join(shares), e.limited_by]  # fmt: skip


def explain(a: Estimate, b: Estimate) -> str:
    """Why one layout is faster than another, component by component."""
    out = io.StringIO()
    console = Console(file=out, width=130)
    table = Table(title=f"A {a.layout}\nB {b.layout}", title_justify="left")
    for heading in ("component", "A", "B", "B - A"):
        table.add_column(heading, justify="left" if heading == "component" else "right")
    parts_a, parts_b = components(a), components(b)
    for name in sorted(parts_a, key=lambda n: -abs(parts_b[n] - parts_a[n])):
        if parts_a[name] or parts_b[name]:
            table.add_row(
                name, seconds(parts_a[name]), seconds(parts_b[name]), signed(parts_b[name] - parts_a[name])
            )
    table.add_row("step", seconds(a.step_s), seconds(b.step_s), signed(b.step_s - a.step_s), style="bold")
    console.print(table)
    gap_s = b.step_s - a.step_s
    most = max(parts_a, key=lambda n: (parts_b[n] - parts_a[n]) * (1 if gap_s >= 0 else -1))
    winner, loser = ("A", "B") if gap_s >= 0 else ("B", "A")
    console.print(
        f"{winner} is {max(a.step_s, b.step_s) / min(a.step_s, b.step_s):.2f} x faster than {loser}, most of it in {most}; "
        f"memory {a.memory.total_bytes / 2**30:.1f} and {b.memory.total_bytes / 2**30:.1f} GiB."
    )
    if a.is_simulated != b.is_simulated:
        console.print(
            "One is simulated and the other by formula: simulate more layouts to compare them by one measure."
        )
    return out.getvalue()


def components(estimate: Estimate) -> dict[str, float]:
    """Seconds that add up to the step."""
    return {**estimate.compute_s, **{f"exposed {axis}": estimate.exposed_s[axis] for axis in reversed(AXES)}}


def y_speedup(plan: Plan) -> str:
    """The speedup of the second tensor axis, if any."""
    best, without = plan.best, plan.best_without_y()
    if without is None:
        return f"No layout with y = 1 can run; the best has y = {best.layout.y}."
    if best.layout.y == 1:
        other = next((e for e in plan.ranked if e.layout.y > 1), None)
        if other is None:
            return "The best layout has y = 1, and none with y > 1 can run."
        return f"The best layout has y = 1; the best with y > 1, {other.layout}, takes {other.step_s / best.step_s:.3f} x as long."
    return (
        f"y = {best.layout.y} earns its place: the best layout without it, {without.layout}, takes "
        f"{without.step_s / best.step_s:.3f} x as long."
    )


def sequence_parallel_speedup(plan: Plan) -> str:
    """The speedup of token-sharded activations, if any; empty where only one kind was tried."""
    best = plan.best
    other = next((e for e in plan.ranked if e.layout.by_tokens != best.layout.by_tokens), None)
    if other is None:
        return ""
    slower = f"{other.step_s / best.step_s:.3f} x as long"
    if best.layout.by_tokens:
        return f"Token-sharded activations earn their place: the best without them, {other.layout}, takes {slower}."
    return f"The best layout has replicated activations; the best with token-sharded ones, {other.layout}, takes {slower}."


def rate_that_hides(
    prices: Prices, layout: Estimate, global_batch_sequences: int, *, shown: float = 0.02
) -> tuple[float, float] | None:
    """(node GB/s, device GB/s) at which exposed time is below ``shown`` of the step; None if no rate does it.

    Both kinds of links are made faster by the same factor; latencies stay.
    """
    links = prices.cluster.links

    def exposed_share(factor: float) -> float:
        cluster = changed(changed(prices.cluster, "node_gbps", factor), "device_gbps", factor)
        estimate = estimate_with(replace(prices, cluster=cluster), layout.layout, global_batch_sequences)
        return sum(estimate.exposed_s.values()) / estimate.step_s

    low, high = 1.0, 1024.0
    if exposed_share(low) <= shown:
        return links.node_gbps, links.device_gbps
    if exposed_share(high) > shown:
        return None
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if exposed_share(middle) <= shown else (middle, high)
    return links.node_gbps * high, links.device_gbps * high


def budget(
    estimate: Estimate, tokens: float, *, price_per_hour: float | None = None, watts: float | None = None
) -> str:
    """What N tokens take: time, and money and energy where a device's are given."""
    hours = tokens / estimate.tokens_per_s / 3600
    device_hours = hours * estimate.layout.ranks
    words = [f"{tokens:.3g} tokens take {hours:,.1f} hours, {device_hours:,.0f} device hours"]
    if price_per_hour is not None:
        words.append(f"{device_hours * price_per_hour:,.0f} at {price_per_hour:g} a device hour")
    if watts is not None:
        words.append(f"{device_hours * watts / 1e6:,.1f} MWh at {watts:g} W a device")
    return "; ".join(words)


def _kind_of(reason: str) -> str:
    if reason.startswith("needs"):
        return "too large for the memory"
    if reason.startswith("the dry run"):
        return "rejected by the dry run"
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
