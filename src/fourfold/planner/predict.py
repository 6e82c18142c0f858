"""A step's time from its dry run and a cluster: each operator and each collective by what it costs there."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fourfold.dry_run.events import Event, Start
from fourfold.mesh.axes import Axis
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.cost.compute import Kernels, operation_s
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.shared_cores import Flown, Pool, simulate_pool
from fourfold.planner.simulate import Simulated, simulate


def predict(
    events: Iterable[Event],
    shape: tuple[int, int, int, int],
    cluster: Cluster,
    kernels: Kernels | None = None,
    *,
    keep_spans: bool = False,
) -> Simulated:
    """Play the events of one rank of a grid ``shape`` = (data, z, y, x) through, on this cluster."""
    measured, inner = cluster.measured, inner_ranks(shape)

    def collective(start: Start) -> float:
        assert start.kind != "all_to_all"  # Muon's alone, and what is rehearsed steps with AdamW
        return collective_s(start.kind, start.payload_bytes, start.ranks, inner[start.axis], cluster)

    def start_s(start: Start) -> float:
        phase = measured.phase("backward" if start.phase == "recompute" else start.phase)
        return phase.start_us * 1e-6 if phase else 0.0

    def link(start: Start) -> str:
        leaves = start.ranks * inner[start.axis] > cluster.links.devices_per_node
        return "between nodes" if leaves else "inside a node"

    def flown(start: Start) -> Flown:
        total_s = collective(start)
        times = measured.collective(start.kind, start.ranks, inner[start.axis])
        latency_s = min(total_s, times.seconds[0]) if times else 0.0
        together = measured.slowdown(start.ranks, inner[start.axis])
        if together is None:
            slow = cluster.slowdown
            return Flown(latency_s, total_s - latency_s, slow.compute, slow.communication, slow.communication)
        return Flown(
            latency_s, total_s - latency_s, together.compute, together.communication, together.latency
        )

    def slow_down(start: Start) -> tuple[float, float]:
        f = flown(start)
        total_s = f.latency_s + f.moving_s
        if total_s <= 0:
            return f.slows_compute, f.moving_slowed
        return f.slows_compute, (f.latency_s * f.latency_slowed + f.moving_s * f.moving_slowed) / total_s

    if measured.crowding > _CROWDED:
        ranks = math.prod(shape)
        cores = max(1, round(ranks / measured.crowding))
        pool = Pool(shape, cores, cluster.links.devices_per_node, cluster.library.in_flight)
        return simulate_pool(
            events,
            pool,
            lambda operation: operation_s(operation, cluster, kernels) * cores / ranks,
            flown,
            start_s=lambda start: start_s(start) * cores / ranks,
        )
    return simulate(
        events,
        lambda operation: operation_s(operation, cluster, kernels),
        collective,
        start_s=start_s,
        link_of=link,
        slow_down=slow_down,
        in_flight=cluster.library.in_flight,
        keep_spans=keep_spans,
    )


_CROWDED = 1.5  # ranks to a core from which on they are taken to share it


def inner_ranks(shape: tuple[int, int, int, int]) -> dict[Axis, int]:
    """How many ranks lie between neighbours along each axis.

    Example:
        >>> inner_ranks((2, 2, 1, 4))
        {'x': 1, 'y': 4, 'z': 4, 'data': 8}
    """
    _, z, y, x = shape
    return {"x": 1, "y": x, "z": x * y, "data": x * y * z}
