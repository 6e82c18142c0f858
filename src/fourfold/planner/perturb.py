"""The same cluster with one of its numbers changed, and with what was measured changed along.

Measurements come before formulas, so a number that is changed alone would change nothing on a calibrated cluster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fourfold.planner.cost.collective import place
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.measured import CollectiveTimes, Measured

SECTIONS = {
    "best_tflops": "device",
    "memory_tbps": "device",
    "launch_us": "device",
    "node_gbps": "links",
    "device_gbps": "links",
    "base_us": "library",
    "net_hop_us": "library",
}


def value_of(cluster: Cluster, name: str) -> float:
    return float(getattr(getattr(cluster, SECTIONS[name]), name))


def changed(cluster: Cluster, name: str, factor: float) -> Cluster:
    """The cluster in which the value ``name`` is multiplied by ``factor``.

    Example:
        >>> from fourfold.planner.inputs.cluster import preset
        >>> changed(preset("dgx-h100"), "node_gbps", 2.0).links.node_gbps
        800.0
    """
    section = SECTIONS[name]
    part = getattr(cluster, section)
    values: dict[str, Any] = {name: getattr(part, name) * factor}
    if name == "device_gbps":  # what was measured inside a node goes with it
        values["measured_gbps"] = tuple((i, r, b * factor) for i, r, b in part.measured_gbps)
        values["pair_gbps"] = None if part.pair_gbps is None else part.pair_gbps * factor
    measured = _changed_measurements(cluster, name, factor)
    return replace(cluster, measured=measured, **{section: replace(part, **values)})


def _changed_measurements(cluster: Cluster, name: str, factor: float) -> Measured:
    measured = cluster.measured
    if name == "best_tflops":
        forward, backward = measured.attention_forward_tflops, measured.attention_backward_tflops
        return replace(
            measured,
            matmuls=tuple(replace(t, seconds=t.seconds / factor) for t in measured.matmuls),
            attention_forward_tflops=forward and forward * factor,
            attention_backward_tflops=backward and backward * factor,
        )
    if name in ("memory_tbps", "launch_us"):
        return measured
    return replace(
        measured, collectives=tuple(_changed_times(t, cluster, name, factor) for t in measured.collectives)
    )


def _changed_times(times: CollectiveTimes, cluster: Cluster, name: str, factor: float) -> CollectiveTimes:
    """The smallest size is latency; what larger ones take beyond it is their bytes."""
    leaves = place(times.ranks, times.inner_ranks, cluster.links.devices_per_node).nodes > 1
    if leaves != {"node_gbps": True, "device_gbps": False, "net_hop_us": True}.get(name, leaves):
        return times
    latency_s = times.seconds[0]
    if name.endswith("_gbps"):
        return replace(times, seconds=tuple(latency_s + (s - latency_s) / factor for s in times.seconds))
    return replace(times, seconds=tuple(s + latency_s * (factor - 1) for s in times.seconds))
