"""How long a collective takes: the least, over algorithms, of hops x latency + bytes / bandwidth.

A group of ranks along one axis lies where the axes inside it put it: with ``inner_ranks`` ranks between neighbours,
``devices_per_node // inner_ranks`` of its ranks share a node, and as many groups as there are inner ranks in a node send
at the same time. The node's cards are shared between them (arXiv 2502.08145, eq. 7).

    ring           (n-k) hops inside nodes and k-1 between them; S (n-1)/n bytes past every link, all-reduce twice both
    tree           all-reduce alone: (g-1) hops inside a node, log2 k between nodes, both ways; 2 S (k-1)/k past a node
    hierarchical   inside the node, then between nodes by recursive doubling: log2 k hops, the bytes of both in turn
    pairwise       all-to-all alone: a hop to every other rank; S (g-1)/n bytes inside a node and g S (n-g)/n out of it

with n ranks on k nodes of g each. Hops and their latencies: NVIDIA/nccl src/graph/tuning.cc.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from fourfold.planner.inputs.cluster import Cluster

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class Placement(NamedTuple):
    """Where the ranks of one group are."""

    ranks: int
    per_node: int
    nodes: int


def place(ranks: int, inner_ranks: int, devices_per_node: int) -> Placement:
    """How many ranks of a group share a node.

    Example:
        >>> place(ranks=16, inner_ranks=4, devices_per_node=8)  # every fourth device: two in each of eight nodes
        Placement(ranks=16, per_node=2, nodes=8)
    """
    per_node = max(1, min(ranks, devices_per_node // inner_ranks))
    return Placement(ranks, per_node, math.ceil(ranks / per_node))


def inside_gbps(per_node: int, inner_ranks: int, cluster: Cluster, *, spans_nodes: bool = False) -> float:
    """What one group's ring reaches inside a node while the other groups do the same.

    A ring that ``spans_nodes`` is driven by the network's channels: a rate measured inside one node does not limit it.
    """
    links = cluster.links
    if spans_nodes:
        return max(_wire_gbps(per_node, cluster), inside_gbps(per_node, inner_ranks, cluster))
    exact = [b for i, r, b in links.measured_gbps if (i, r) == (inner_ranks, per_node)]
    if exact:
        return exact[0]
    # The nearest that was measured at this stride or below; with a switch the stride does not matter.
    near = [(i, r, b) for i, r, b in links.measured_gbps if i <= inner_ranks and r <= per_node]
    if near:
        return max(near)[2]
    return _wire_gbps(per_node, cluster)


def _wire_gbps(per_node: int, cluster: Cluster) -> float:
    links = cluster.links
    wire = links.device_gbps
    if links.pair_gbps is not None:
        wire = min(wire, links.pair_gbps * (per_node - 1))  # one ring over each of a device's other pairs
    return wire * cluster.library.device_share


def between_gbps(inner_ranks: int, cluster: Cluster) -> float:
    """One group's part of what its node sends (arXiv 2502.08145, eq. 7)."""
    groups = min(cluster.links.devices_per_node, inner_ranks)
    return cluster.links.node_gbps * cluster.library.node_share / groups


def collective_s(kind: Kind, payload_bytes: float, ranks: int, inner_ranks: int, cluster: Cluster) -> float:
    """Seconds of one collective: as it was measured on this cluster, else by the formulas above.

    ``payload_bytes`` is the whole tensor: what an all-reduce adds up, an all-gather puts out, a reduce-scatter takes in.
    ``inner_ranks`` is the product of the axes inside this one.

    Example:
        >>> from fourfold.planner.inputs.cluster import preset
        >>> inside = collective_s("all_gather", 2**30, 8, 1, preset("dgx-h100"))
        >>> collective_s("all_gather", 2**30, 8, 8, preset("dgx-h100")) > 5 * inside
        True
    """
    if ranks < 1 or inner_ranks < 1 or payload_bytes < 0:
        raise ValueError(
            f"a collective of {payload_bytes} bytes over {ranks} ranks, {inner_ranks} apart: use at least 0 bytes and 1 rank"
        )
    if ranks == 1:
        return 0.0
    measured = cluster.measured.collective(kind, ranks, inner_ranks)
    if measured is not None:
        return measured.at(payload_bytes)
    library = cluster.library
    placement = place(ranks, inner_ranks, cluster.links.devices_per_node)
    spans_nodes = placement.nodes > 1
    inside = between = math.inf
    if placement.per_node > 1:
        inside = inside_gbps(placement.per_node, inner_ranks, cluster, spans_nodes=spans_nodes)
    if spans_nodes:
        between = between_gbps(inner_ranks, cluster)
    if kind == "reduce_scatter":
        payload_bytes *= library.reduce_scatter_factor
    large = (library.base_us, library.hop_us, library.net_hop_us, math.inf)
    small = (library.small_base_us, library.small_hop_us, library.small_net_hop_us, library.small_gbps)
    protocols = [
        Protocol(base, hop, net_hop, min(inside, limit), min(between, limit), library.in_switch_gain)
        for base, hop, net_hop, limit in (large, small)
    ]
    algorithms = ("pairwise",) if kind == "all_to_all" else library.algorithms
    return min(_COSTS[a](kind, payload_bytes, placement, p) for a in algorithms for p in protocols)


class Protocol(NamedTuple):
    """Latencies and bandwidths of one protocol of the library on one group's links."""

    base_us: float
    hop_us: float
    net_hop_us: float
    inside_gbps: float
    between_gbps: float
    in_switch_gain: float


def _ring_s(kind: Kind, payload_bytes: float, at: Placement, by: Protocol) -> float:
    passes = 2 if kind == "all_reduce" else 1
    hops_us = (at.ranks - at.nodes) * by.hop_us + (at.nodes - 1) * by.net_hop_us
    bandwidth_gbps = min(by.inside_gbps, by.between_gbps)
    if kind == "all_reduce" and at.nodes == 1 and at.ranks >= 5 and by.in_switch_gain > 1.0:
        # NCCL uses NVLS from five ranks on: one hop to the switch, which adds, and one back.
        hops_us = by.hop_us
        bandwidth_gbps *= by.in_switch_gain
    moved_bytes = payload_bytes * (at.ranks - 1) / at.ranks
    return by.base_us * 1e-6 + passes * (hops_us * 1e-6 + moved_bytes / (bandwidth_gbps * 1e9))


def _tree_s(kind: Kind, payload_bytes: float, at: Placement, by: Protocol) -> float:
    if kind != "all_reduce":  # there is no tree for the others
        return math.inf
    hops_us = (at.per_node - 1) * by.hop_us + math.ceil(math.log2(at.nodes)) * by.net_hop_us
    # Up and down at once inside a node; a node of two trees sends its data twice, without its own part.
    moving_s = max(
        2 * payload_bytes * (at.per_node - 1) / at.per_node / (by.inside_gbps * 1e9),
        2 * payload_bytes * (at.nodes - 1) / at.nodes / (by.between_gbps * 1e9),
    )
    return by.base_us * 1e-6 + 2 * hops_us * 1e-6 + moving_s


def _hierarchical_s(kind: Kind, payload_bytes: float, at: Placement, by: Protocol) -> float:
    passes = 2 if kind == "all_reduce" else 1
    hops_us = (at.per_node - 1) * by.hop_us + math.ceil(math.log2(at.nodes)) * by.net_hop_us
    # Each of the g ranks of a node sends a g-th of the tensor to the other nodes, together over all of the node's cards.
    inside_s = payload_bytes * (at.per_node - 1) / at.per_node / (by.inside_gbps * 1e9)
    between_s = payload_bytes * (at.nodes - 1) / at.nodes / (by.between_gbps * 1e9)
    return 2 * by.base_us * 1e-6 + passes * (hops_us * 1e-6 + inside_s + between_s)


def _pairwise_s(kind: Kind, payload_bytes: float, at: Placement, by: Protocol) -> float:
    hops_us = (at.ranks - at.nodes) * by.hop_us + (at.nodes - 1) * by.net_hop_us
    moving_s = max(
        payload_bytes * (at.per_node - 1) / at.ranks / (by.inside_gbps * 1e9),
        at.per_node * payload_bytes * (at.ranks - at.per_node) / at.ranks / (by.between_gbps * 1e9),
    )
    return (by.base_us + hops_us) * 1e-6 + moving_s


_COSTS = {"ring": _ring_s, "tree": _tree_s, "hierarchical": _hierarchical_s, "pairwise": _pairwise_s}
