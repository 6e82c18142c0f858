"""Starts the ranks of a cluster in slow motion, and has them play programs in turns."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.slow_motion.machines import PORT, Machines, Scale
from benchmarks.slow_motion.program import Program
from fourfold.planner.inputs.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
MOST_CPU = 0.60  # of the cores; more, and the cores may have set the time
_AHEAD_S = 0.05  # for all ranks to hear of a step before it begins


@dataclass(frozen=True)
class Played:
    """The steps of one program: seconds of the slowest rank, scaled back, and CPU use of all ranks together."""

    seconds: tuple[float, ...]
    cpu: float  # of all cores

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The whole range, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s

    def __str__(self) -> str:
        return f"{self.median_s * 1e3:8.2f} ms, spread {self.spread:.1%}, {self.cpu:.0%} of the cores"


class Orchestra:
    """The ranks of a cluster, ready to play, from `with` to its end."""

    def __init__(self, cluster: Cluster, nodes: int, scale: Scale, programs: Mapping[str, Program]) -> None:
        self.cluster, self.nodes, self.scale, self.programs = cluster, nodes, scale, dict(programs)
        self.machines = Machines.like(cluster, nodes, scale)

    def __enter__(self) -> Orchestra:
        self._folder = tempfile.TemporaryDirectory()
        self.machines.__enter__()
        path = str(Path(self._folder.name) / "conductor")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(self.machines.hosts)
        listener.settimeout(120)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{ROOT}:{before or ''}"
        try:
            for rank in range(self.machines.hosts):
                player = [sys.executable, "-m", "benchmarks.slow_motion.player", path, str(rank)]
                self.machines.start(rank, player)
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        self._lines: dict[int, Any] = {}
        for _ in range(self.machines.hosts):
            connection, _ = listener.accept()
            lines = connection.makefile("rw")
            self._lines[int(lines.readline())] = lines
        plan = {
            "programs": {name: program.streams for name, program in self.programs.items()},
            "dilation": self.scale.dilation,
            "payload": self.scale.payload,
            "library": asdict(self.cluster.library),
            "per_node": self.machines.per_node,
            "inside": [self.machines.inside(rank) for rank in range(self.machines.hosts)],
            "outside": [self.machines.outside(rank) for rank in range(self.machines.hosts)],
            "port": PORT,
            "folder": self._folder.name,
            "mbit": {"inside": self.machines.device_mbit, "outside": self.machines.node_mbit},
            "piece_bytes": {
                "inside": self.machines.piece_bytes(self.machines.device_mbit),
                "outside": self.machines.piece_bytes(self.machines.node_mbit),
            },
        }
        self._tell(plan)
        for rank, lines in self._lines.items():
            if lines.readline().strip() != "ready":
                raise RuntimeError(f"rank {rank} did not get ready")
        return self

    def __exit__(self, *error: Any) -> None:
        self.machines.close()
        self._folder.cleanup()

    def _tell(self, words: Any) -> None:
        for lines in self._lines.values():
            print(json.dumps(words), file=lines, flush=True)

    def step(self, name: str) -> tuple[float, float]:
        """(seconds of the slowest rank as on the cluster, CPU seconds of all ranks)."""
        self._tell([name, time.perf_counter() + _AHEAD_S])
        answers = []
        for rank, lines in self._lines.items():
            said = lines.readline()
            if not said:
                raise RuntimeError(f"rank {rank} ended while it played {name}")
            answers.append(json.loads(said))
        seconds = max(a["seconds"] for a in answers) / self.scale.dilation
        return seconds, sum(a["cpu_s"] for a in answers)

    def play(self, steps: int) -> dict[str, Played]:
        """Every program so often, in turns, after one step each that is not counted."""
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self.programs}
        for turn in range(steps + 1):
            for name in self.programs:
                seen = self.step(name)
                if turn:
                    found[name].append(seen)
        cores = len(os.sched_getaffinity(0))
        return {
            name: Played(
                tuple(seconds for seconds, _ in seen),
                sum(cpu for _, cpu in seen)
                / (cores * self.scale.dilation * sum(seconds for seconds, _ in seen)),
            )
            for name, seen in found.items()
        }


def report(played: Mapping[str, Played]) -> bool:
    """Print each, and whether the cores were idle enough for the times to count."""
    width = max(map(len, played))
    for name, result in played.items():
        print(f"    {name:{width}} {result}")
    busiest = max(result.cpu for result in played.values())
    if busiest > MOST_CPU:
        print(f"invalid: ranks took {busiest:.0%} of the cores, more than {MOST_CPU:.0%}")
    return busiest <= MOST_CPU
