"""Nodes of ranks with links of two rates: of a device inside its node, and of a node, which its ranks share.

Each rank is a network namespace with two addresses. One is on the switch of its node, and its link has the rate of a device there.
The other leads to the network between nodes, over the link of its node:

    rank - eth0 - (device's rate) - switch of the node
    rank - eth1 - the node's cards - (node's rate) - switch between nodes

The network of the machine itself is not touched. Needs root and iproute2.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import cluster as hosts
from fourfold.planner.inputs.cluster import Cluster

PORT = 29600
_MOST_BYTES = 64_000  # that the kernel hands to a link at once
# Bytes of a frame for a byte in it: the headers of Ethernet, and of IP and TCP with timestamps.
_WITH_HEADERS = (hosts.MTU_BYTES + 14) / (hosts.MTU_BYTES - 52)


@dataclass(frozen=True)
class Scale:
    """How much slower, and how much fewer bytes.

    Example:
        >>> Scale(dilation=100, payload=200).mbit(400)  # of 400 GB/s
        160.0
    """

    dilation: float  # seconds here for a second there
    payload: float  # bytes there for a byte here

    def mbit(self, gbps: float) -> float:
        return gbps * 8e3 / (self.dilation * self.payload)


class Machines(hosts.Cluster):
    """``nodes`` of ``per_node`` ranks, from `with` to its end. Rates are those of what is sent, without its headers."""

    def __init__(self, nodes: int, per_node: int, device_mbit: float, node_mbit: float) -> None:
        super().__init__(nodes * per_node, None)
        self.nodes, self.per_node = nodes, per_node
        self.device_mbit, self.node_mbit = device_mbit, node_mbit

    def piece_bytes(self, mbit: float) -> int:
        """What a link gets at once: a frame between nodes, and inside a node what takes as long there.

        A link lets a piece pass at once and waits afterwards, so that a message comes too early by what its last piece takes. `Ring.run` waits for that.
        """
        return round(min(_MOST_BYTES, hosts.MTU_BYTES * max(1.0, mbit / self.node_mbit)))

    @classmethod
    def like(cls, cluster: Cluster, nodes: int, scale: Scale) -> Machines:
        """Nodes of this cluster, with what its library reaches of its links."""
        links, library = cluster.links, cluster.library
        return cls(
            nodes,
            links.devices_per_node,
            scale.mbit(links.device_gbps * library.device_share),
            scale.mbit(links.node_gbps * library.node_share),
        )

    def inside(self, rank: int) -> str:
        return f"10.77.{rank // self.per_node}.{rank % self.per_node + 1}"

    def outside(self, rank: int) -> str:
        return f"10.78.0.{rank + 1}"

    def address(self, index: int) -> str:  # type: ignore[override]
        return self.outside(index)

    def _build(self) -> None:
        call = hosts._call

        def size(mbit: float) -> list[str]:
            return ["mtu", str(hosts.MTU_BYTES), "gso_max_size", str(self.piece_bytes(mbit))]

        switch = hosts._switch(self.run_name)
        call("ip", "netns", "add", switch)
        for name in ("between", *(f"{kind}{n}" for n in range(self.nodes) for kind in ("in", "out"))):
            call("ip", "-n", switch, "link", "add", name, "mtu", str(hosts.MTU_BYTES), "type", "bridge")
            call("ip", "-n", switch, "link", "set", name, "up")
        limits: dict[str, dict[str, float]] = {switch: {}}
        for node in range(self.nodes):
            up, down = f"up{node}", f"down{node}"
            call("ip", "-n", switch, "link", "add", up, "type", "veth", "peer", "name", down)
            of_node = size(self.node_mbit)
            call("ip", "-n", switch, "link", "set", up, *of_node, "master", f"out{node}", "up")
            call("ip", "-n", switch, "link", "set", down, *of_node, "master", "between", "up")
            limits[switch] |= {up: self.node_mbit, down: self.node_mbit}
        for rank in range(self.hosts):
            host, node = hosts._host(self.run_name, rank), rank // self.per_node
            call("ip", "netns", "add", host)
            links = (
                ("eth0", f"a{rank}", f"in{node}", self.inside(rank), self.device_mbit),
                ("eth1", f"b{rank}", f"out{node}", self.outside(rank), self.node_mbit),
            )
            for own, port, bridge, address, mbit in links:
                veth = ["type", "veth", "peer", "name", own, "netns", host]
                call("ip", "-n", switch, "link", "add", port, *veth)
                call("ip", "-n", switch, "link", "set", port, *size(mbit), "master", bridge, "up")
                call("ip", "-n", host, "link", "set", own, *size(mbit), "up")
                call("ip", "-n", host, "address", "add", f"{address}/24", "dev", own)
            call("ip", "-n", host, "link", "set", "lo", "up")
            call(
                *("ip", "netns", "exec", host, "sh", "-c"),
                "cd /proc/sys/net; echo reno > ipv4/tcp_congestion_control; echo 0 > ipv4/tcp_slow_start_after_idle; echo 1 > ipv6/conf/all/disable_ipv6; :",
            )
            limits[host] = {"eth0": self.device_mbit}
            limits[switch][f"a{rank}"] = self.device_mbit
        hosts.limit(
            {where: {d: mbit * _WITH_HEADERS for d, mbit in of.items()} for where, of in limits.items()}
        )

    def measured_mbit(self) -> tuple[float, float]:
        """What one connection reaches inside a node, and between two."""
        inside = self._probe_to(0, 1, self.inside(1)) if self.per_node > 1 else float("nan")
        last = self.hosts - 1
        between = self._probe_to(0, last, self.outside(last)) if self.nodes > 1 else float("nan")
        return inside, between
