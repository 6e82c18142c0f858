"""Clusters whose proportions are played: the planner's presets, in nodes of a few devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.slow_motion.machines import Scale
from benchmarks.slow_motion.program import Program
from benchmarks.slow_motion.steps import price_of
from fourfold.planner.inputs.cluster import Cluster, Slowdown, preset

CLOUD = "100 Gbit/s cloud"
CLUSTERS = ("dgx-h100", "frontier", CLOUD)
# Megabits that the links of a node move in a second, here.
_NODE_MBIT = 140.0


def cluster_of(name: str, per_node: int) -> Cluster:
    """Nodes of so many devices, with their part of the node's cards.

    As it is played: every collective is a ring, at the rate of the links, and takes no multiprocessors from computation; a switch
    joins the devices of a node.
    """
    whole = preset("dgx-h100" if name == CLOUD else name)
    links = whole.links
    node_gbps = 12.5 if name == CLOUD else links.node_gbps * per_node / links.devices_per_node
    return replace(
        whole,
        links=replace(
            links, devices_per_node=per_node, node_gbps=node_gbps, pair_gbps=None, measured_gbps=()
        ),
        library=replace(whole.library, algorithms=("ring",), small_gbps=1e-9),
        slowdown=Slowdown(1.0, 1.0),
    )


def scale_of(cluster: Cluster, fastest_s: float, played_s: float) -> Scale:
    """A step of ``fastest_s`` on the cluster takes ``played_s`` here.

    Of links their rates are measured. Fewer bytes leave the proportions.
    """
    dilation = played_s / fastest_s
    whole_mbit = cluster.links.node_gbps * cluster.library.node_share * 8e3 / dilation
    return Scale(dilation, max(1.0, whole_mbit / _NODE_MBIT))


def balanced(program: Program, cluster_with: Callable[[float], Cluster], wanted_s: float) -> Cluster:
    """The cluster on which the program's communication alone takes so long: of those that differ in their nodes' GB/s."""
    gbps = 50.0
    for _ in range(20):
        gbps *= sum(map(price_of(cluster_with(gbps)), program.sends())) / wanted_s
    return cluster_with(gbps)
