"""Predict a step's time from its dry run: the cost of each operator and each collective on a cluster."""

from __future__ import annotations

from collections.abc import Iterable

from fourfold.dry_run.events import Event, Start
from fourfold.mesh.axes import Axis
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.cost.compute import Kernels, operation_s
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.simulate import Simulated, simulate


def predict(
    events: Iterable[Event],
    shape: tuple[int, int, int, int],
    cluster: Cluster,
    kernels: Kernels | None = None,
    *,
    keep_spans: bool = False,
) -> Simulated:
    """Simulate the events of one rank of a grid ``shape`` = (data, z, y, x) on this cluster."""
    inner = inner_ranks(shape)

    def collective(start: Start) -> float:
        return collective_s(start.kind, start.payload_bytes, start.ranks, inner[start.axis], cluster)

    def link(start: Start) -> str:
        leaves = start.ranks * inner[start.axis] > cluster.links.devices_per_node
        return "between nodes" if leaves else "inside a node"

    def slow_down(start: Start) -> tuple[float, float]:
        slow = cluster.measured.slowdown(start.ranks, inner[start.axis]) or cluster.slowdown
        return slow.compute, slow.communication

    return simulate(
        events,
        lambda operation: operation_s(operation, cluster, kernels),
        collective,
        link_of=link,
        slow_down=slow_down,
        in_flight=cluster.library.in_flight,
        keep_spans=keep_spans,
    )


def inner_ranks(shape: tuple[int, int, int, int]) -> dict[Axis, int]:
    """How many ranks lie between neighbours along each axis.

    Example:
        >>> inner_ranks((2, 2, 1, 4))
        {'x': 1, 'y': 4, 'z': 4, 'data': 8}
    """
    _, z, y, x = shape
    return {"x": 1, "y": x, "z": x * y, "data": x * y * z}
