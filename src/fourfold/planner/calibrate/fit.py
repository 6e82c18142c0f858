"""From measurements to the parameters of the cost model, with how far the model is from each measurement."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fourfold.planner.cost.collective import collective_s, place
from fourfold.planner.inputs.cluster import Cluster, Library, Links
from fourfold.planner.inputs.measured import CollectiveTimes, Measured, spread


class Parameter(NamedTuple):
    """A fitted value and the interquartile range of what it was fitted to."""

    name: str
    value: float
    spread: float
    unit: str
    is_measured: bool = True  # no: nothing was sent over that link, and the value is that of the other one


class Deviation(NamedTuple):
    """How far the fitted formulas are from a measurement."""

    what: str
    measured_s: float
    formula_s: float

    @property
    def error(self) -> float:
        return self.formula_s / self.measured_s - 1


def fit_links(
    series: Sequence[CollectiveTimes], devices_per_node: int, library: Library
) -> tuple[Links, Library, list[Parameter]]:
    """Bandwidths from the largest sizes, latencies from the smallest ones.

    A link has the rate that the best kind of collective reaches at a position; reduce-scatters that reach less have a
    factor. A link that no collective used (a single node, one device per node) gets the other's value.
    """
    reached: dict[tuple[int, int], dict[str, float]] = {}
    rows, latencies_s = [], []
    for times in series:
        at = place(times.ranks, times.inner_ranks, devices_per_node)
        passes = 2 if times.kind == "all_reduce" else 1
        if len(times.seconds) > 1:
            # The steepest slope to the largest size. A disturbed smaller payload makes its own slope flatter, that is, the link
            # faster; one undisturbed payload is enough.
            *smaller, (most, most_s) = zip(times.payload_bytes, times.seconds, strict=True)
            slope = max((most_s - seconds) / (most - size) for size, seconds in smaller)
            if slope > 0:
                gbps = passes * (at.ranks - 1) / at.ranks / slope / 1e9
                reached.setdefault((times.ranks, times.inner_ranks), {})[times.kind] = gbps
        rows.append([1.0, passes * (at.ranks - at.nodes), passes * (at.nodes - 1)])
        latencies_s.append(times.seconds[0])
    inside, between, factors = [], [], [1.0]
    for (ranks, inner), of_kinds in reached.items():
        best = max(of_kinds.values())
        if place(ranks, inner, devices_per_node).nodes > 1:
            between.append(best * min(devices_per_node, inner))
        else:
            inside.append(best)
        if "reduce_scatter" in of_kinds:
            factors.append(best / of_kinds["reduce_scatter"])
    is_inside, is_between = bool(inside), bool(between)
    inside, between = inside or between, between or inside
    if not inside:
        raise ValueError(
            f"{len(series)} series of collectives show no bandwidth: times do not grow with sizes; give more time, or use at "
            "least 2 ranks"
        )
    base, hop, net_hop = least_squares(rows, latencies_s)
    device_gbps, node_gbps = statistics.median(inside), statistics.median(between)
    links = Links(devices_per_node, device_gbps, node_gbps)
    parameters = [
        Parameter("device_gbps", device_gbps, spread(inside), "GB/s inside a node", is_inside),
        Parameter("node_gbps", node_gbps, spread(between), "GB/s out of a node", is_between),
        Parameter("base_us", base * 1e6, spread([s * 1e6 for s in latencies_s]), "us, any collective"),
        Parameter("hop_us", hop * 1e6, 0.0, "us, each hop inside a node", is_inside),
        Parameter("net_hop_us", net_hop * 1e6, 0.0, "us, each hop between nodes", is_between),
    ]
    latencies_us: dict[str, Any] = {p.name: p.value for p in parameters if p.name.endswith("_us")}
    # One protocol for all sizes. These are measured rates, so the shares of a data sheet's rates are 1.
    fitted = replace(
        library,
        **latencies_us,
        **{f"small_{name}": us for name, us in latencies_us.items()},
        device_share=1.0,
        node_share=1.0,
        reduce_scatter_factor=statistics.median(factors),
    )
    return links, fitted, parameters


def collective_deviations(cluster: Cluster) -> list[Deviation]:
    """The formulas with the fitted parameters against every collective that was measured."""
    formulas = replace(cluster, measured=Measured())
    return [
        Deviation(
            f"{t.kind} of {size / 1024:,.0f} KiB over {t.ranks} ranks, {t.inner_ranks} apart",
            seconds,
            collective_s(t.kind, size, t.ranks, t.inner_ranks, formulas),  # type: ignore[arg-type]
        )
        for t in cluster.measured.collectives
        for size, seconds in zip(t.payload_bytes, t.seconds, strict=True)
    ]


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The coefficients, none below 0, that come nearest to the values: the best of all choices of which are 0.

    Example:
        >>> [round(c, 6) for c in least_squares([[1, 0], [1, 1], [1, 2]], [1, 3, 5])]
        [1.0, 2.0]
        >>> [round(c, 6) for c in least_squares([[1, 0], [1, 1], [1, 2]], [5, 3, 1])]  # no rise: a constant alone
        [3.0, 0.0]
    """
    a, b = np.array(rows, dtype=float), np.array(values, dtype=float)
    columns = a.shape[1]
    best, least = np.zeros(columns), float(b @ b)
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            found, *_ = np.linalg.lstsq(a[:, chosen], b, rcond=None)
            if (found < 0).any():
                continue
            off = a[:, chosen] @ found - b
            if float(off @ off) < least * (1 - 1e-9):
                best, least = np.zeros(columns), float(off @ off)
                best[list(chosen)] = found
    return [float(c) for c in best]
