"""Single answers about a plan: the layout of a table row, the bandwidth that hides communication, the plan as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.search import Plan
from fourfold.planner.show.tables import rate_that_hides


def hiding_bandwidth(prices: Prices, best: Estimate, sequences: int) -> str:
    """The bandwidth at which the best layout's communication would be hidden, as a sentence."""
    rates = rate_that_hides(prices, best, sequences)
    if rates is None:
        return "No bandwidth would hide all communication of the best layout: latencies and exposed collectives remain."
    links = prices.cluster.links
    if rates == (links.node_gbps, links.device_gbps):
        return "By the formulas, all but 2 % of the best layout's communication is hidden."
    return (
        f"By the formulas, all but 2 % of the best layout's communication would be hidden at {rates[0]:.0f} GB/s between "
        f"nodes (the cluster has {links.node_gbps:g}) and {rates[1]:.0f} GB/s inside a node (it has {links.device_gbps:g})."
    )


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
