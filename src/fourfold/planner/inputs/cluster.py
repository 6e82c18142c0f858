"""A cluster: its devices, the links inside a node and between nodes, and the library that drives them.

Presets are in `clusters.json`, with their sources. What a preset lacks is filled with a stated default and listed in
`Cluster.assumed`. A cluster of one's own is a TOML file; `calibrate` writes one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fourfold.files import toml_value
from fourfold.planner.inputs.measured import Measured, as_tuples, check_keys, from_tables


@dataclass(frozen=True)
class Device:
    """One rank's processor."""

    name: str
    best_tflops: float  # the fastest bf16 matmul that was measured on it
    memory_gib: float  # what is sold as 80 GB is 80 GiB
    memory_tbps: float
    multiprocessors: int  # that share the tiles of a matmul
    spec_tflops: float | None = None  # dense bf16 of the data sheet; a device without one has no MFU
    float8_tflops: float | None = (
        None  # dense e4m3 of the data sheet; on a device without one float8 is not priced
    )
    launch_us: float = 7.0  # no kernel is shorter (meta-pytorch/autoparallel uses the same floor)
    memory_share: float = 0.85  # of memory_tbps that a large element-wise kernel reaches (Calculon: .90-.95)
    host_gbps: float = 32.0  # to the memory of its host, one direction: PCIe 4.0 with 16 lanes
    # Of host_gbps that a copy of pinned memory reaches; 24.8 GB/s by nvbandwidth on a node of 8 A100, one way at a time.
    host_share: float = 0.78

    @property
    def best_float8_tflops(self) -> float:
        """The fastest matmul of e4m3: the same part of the data sheet as in bf16, which is assumed."""
        if self.float8_tflops is None or self.spec_tflops is None:
            raise ValueError(
                f"{self.name} has float8_tflops={self.float8_tflops} and spec_tflops={self.spec_tflops}, and both are needed to price float8 "
                "on it; use float8='none', or a cluster whose [device] has both"
            )
        return self.best_tflops * self.float8_tflops / self.spec_tflops


@dataclass(frozen=True)
class Links:
    """What carries bytes: inside a node, and from a node to the others. All in GB/s of one direction: eight cards of 400 Gbit/s are 400."""

    devices_per_node: int
    device_gbps: float  # what a device can send inside its node
    node_gbps: float  # what a node can send to other nodes, all its network cards together
    pair_gbps: float | None = None  # between two devices of a node, where no switch joins them
    # Measured bus bandwidth inside a node: (product of the inner axes, ranks of the group, GB/s), all groups at once.
    measured_gbps: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True)
class Library:
    """What a collective costs beyond bytes, and which algorithms there are."""

    name: str = "nccl"
    # What any collective costs. NCCL reckons with 8.4 (src/graph/tuning.cc, Simple); 30 is fitted to half of the
    # all-reduces that vTrain measured on NVLink (tests/planner/cost/test_collective.py).
    base_us: float = 30.0
    hop_us: float = 3.4  # a hop inside the node, ring, Simple
    net_hop_us: float = 14.0  # a hop between nodes, Simple
    device_share: float = 0.80  # of device_gbps that a ring reaches
    node_share: float = 0.967  # of node_gbps that a ring reaches
    # The protocol for small messages (LL): fewer microseconds, far fewer bytes a second.
    small_base_us: float = 6.6
    small_hop_us: float = 0.6
    small_net_hop_us: float = 5.0
    small_gbps: float = 5.0
    # Where a switch adds (NVLS), an all-reduce inside a node is this much faster than a ring; 1 where there is none.
    in_switch_gain: float = 1.0
    reduce_scatter_factor: float = 1.0  # times the bytes of a ring; Gloo sends twice what is needed
    algorithms: tuple[str, ...] = ("ring", "tree")


# Gloo's values are of the order seen between processes on one host; calibrate measures real ones.
LIBRARIES = {
    "nccl": Library(),
    "gloo": Library(
        name="gloo",
        base_us=300.0,
        hop_us=50.0,
        net_hop_us=50.0,
        device_share=0.6,
        node_share=0.9,
        small_base_us=300.0,
        small_hop_us=50.0,
        small_net_hop_us=50.0,
        reduce_scatter_factor=2.0,
        algorithms=("ring",),
    ),
}


@dataclass(frozen=True)
class Slowdown:
    """How much longer each side takes while computation and communication run at the same time."""

    compute: float = 1.05  # Calculon: 15 % of the multiprocessors for NVLink, 2 % for the network card
    communication: float = 1.10


@dataclass(frozen=True)
class Cluster:
    name: str
    device: Device
    links: Links
    library: Library = field(default_factory=Library)
    slowdown: Slowdown = field(default_factory=Slowdown)
    measured: Measured = field(default_factory=Measured)
    source: str = ""
    assumed: tuple[str, ...] = ()  # fields that no source gave

    @property
    def target(self) -> Literal["cpu", "cuda"]:
        """The device type that decisions are made for."""
        return "cpu" if self.library.name == "gloo" else "cuda"

    @property
    def precision(self) -> str:
        """The default precision of a run on these devices."""
        return "bf16" if self.target == "cuda" else "fp32"


# -- presets ----------------------------------------------------------------------------------------------------------

_PRESETS = Path(__file__).with_name("clusters.json")


def presets() -> list[str]:
    """The names of the clusters that come with Fourfold."""
    return list(_read_presets())


def preset(name: str) -> Cluster:
    """A cluster that comes with Fourfold.

    Example:
        >>> preset("dgx-h100").links.devices_per_node
        8
    """
    entries = _read_presets()
    if name not in entries:
        near = difflib.get_close_matches(name, entries, 1, cutoff=0.0)[0]
        raise ValueError(
            f"no cluster named {name!r} among the {len(entries)} presets ({', '.join(sorted(entries))}); did you mean "
            f"{near!r}? A cluster of your own is a TOML file: pass its path"
        )
    return from_dict(entries[name])


def load(name_or_path: str | Path) -> Cluster:
    """A preset by its name, or a cluster by the path of its TOML file."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.exists():
            raise ValueError(
                f"there is no cluster file {path}; give the path of a TOML file or one of {presets()}"
            )
        return from_dict(tomllib.loads(path.read_text()))
    return preset(str(name_or_path))


def _read_presets() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(_PRESETS.read_text())}


# -- reading and writing ----------------------------------------------------------------------------------------------

_SECTIONS: dict[str, type] = {
    "device": Device,
    "links": Links,
    "library": Library,
    "slowdown": Slowdown,
    "measured": Measured,
}


def from_dict(values: dict[str, Any]) -> Cluster:
    """A cluster from what a TOML or JSON file says; an unknown key is rejected with the nearest known one."""
    check_keys("a cluster file", values, ["name", "source", "assumed", *_SECTIONS])
    name = str(values.get("name", "unnamed"))
    parts = {section: _section(section, values.get(section, {}), name) for section in _SECTIONS}
    source, assumed = str(values.get("source", "")), tuple(values.get("assumed", ()))
    cluster = Cluster(name, **parts, source=source, assumed=assumed)
    _check_values(cluster)
    return cluster


def _section(section: str, values: dict[str, Any], cluster: str) -> Any:
    kind = _SECTIONS[section]
    if kind is Measured:
        return from_tables(values)
    fields = dataclasses.fields(kind)
    check_keys(f"[{section}]", values, [f.name for f in fields])
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    missing = [n for n in required if n not in values]
    if missing:
        raise ValueError(
            f"[{section}] of cluster {cluster!r} lacks {len(missing)} of {len(required)} values: "
            f"{', '.join(missing)}; add them, or start from a preset ({', '.join(presets())})"
        )
    return kind(**{key: as_tuples(value) for key, value in values.items()})


def to_toml(cluster: Cluster) -> str:
    """The cluster as a TOML file that `load` reads back to the same.

    Example:
        >>> from_dict(tomllib.loads(to_toml(preset("alps-gh200")))) == preset("alps-gh200")
        True
    """
    lines = [f"{key} = {toml_value(getattr(cluster, key))}" for key in ("name", "source", "assumed")]
    for section in _SECTIONS:
        part = getattr(cluster, section)
        if part == Measured():
            continue
        lines += ["", f"[{section}]"]
        for key, value in dataclasses.asdict(part).items():
            if section == "measured" and isinstance(value, tuple):  # a line for each measurement
                lines += [f"{key} = [", *(f"    {toml_value(row)}," for row in value), "]"]
            elif value is not None:
                lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def _check_values(cluster: Cluster) -> None:
    for section in _SECTIONS:
        for key, value in dataclasses.asdict(getattr(cluster, section)).items():
            if isinstance(value, int | float) and value <= 0 and not key.endswith("_us"):
                raise ValueError(
                    f"{key} of [{section}] of cluster {cluster.name!r} is {value}; use a number greater than 0"
                )
    best, spec = cluster.device.best_tflops, cluster.device.spec_tflops
    if spec is not None and best > spec:
        raise ValueError(
            f"the best matmul of {cluster.device.name} is given as {best} TFLOP/s, more than its data sheet's {spec}; "
            "swap them, or leave spec_tflops away"
        )
    known = {"ring", "tree", "hierarchical"}
    if not cluster.library.algorithms or set(cluster.library.algorithms) - known:
        raise ValueError(
            f"algorithms {cluster.library.algorithms} of [library] of cluster {cluster.name!r}: use some of {sorted(known)}"
        )
