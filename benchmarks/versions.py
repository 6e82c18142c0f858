"""Is this version slower than another one? Steps of both, in turns.

The ranks of both versions stay alive, and take a step each in every round, so that what else the machine does affects both
alike. The other version is a checkout with its own environment in `.ci/venv`; its own `benchmarks.engine` builds its step.
A step takes as long as its slowest rank. CPU time is that of all ranks together.

Used by `benchmarks.engine --compare-to`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S, STEP_S, STOP_S = 300.0, 120.0, 15.0


@dataclass(frozen=True)
class Work:
    """A part of benchmarks.engine, and the size of its model and batch."""

    part: str
    ranks: int
    hosts: int
    hidden: int
    layers: int
    sequences: int
    length: int

    @property
    def words(self) -> list[str]:
        sizes = (self.hosts, self.hidden, self.layers, self.sequences, self.length)
        return [self.part, *(str(size) for size in sizes)]


@dataclass(frozen=True)
class Compared:
    """Each round's step of this version relative to that of the other."""

    before_s: list[float]
    now_s: list[float]
    before_cpu_s: list[float]
    now_cpu_s: list[float]
    mbit: float | None

    def __str__(self) -> str:
        seconds, cpu = (_ratios(self.now_s, self.before_s), _ratios(self.now_cpu_s, self.before_cpu_s))
        rate = f", {self.mbit:.0f} Mbit/s" if self.mbit else ""
        return (
            f"{_middle(seconds)}; CPU time {_middle(cpu)}; before {statistics.median(self.before_s):.3f} s, "
            f"now {statistics.median(self.now_s):.3f} s{rate}"
        )

    @property
    def ratio(self) -> float:
        return statistics.median(_ratios(self.now_s, self.before_s))


def _ratios(now: list[float], before: list[float]) -> list[float]:
    return [a / b for a, b in zip(now, before, strict=True)]


def _middle(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.3f} (quartiles {low:.3f} to {high:.3f})"


class _Ranks:
    """The ranks of one version, each at one end of a socket. A path reaches into every network namespace."""

    def __init__(self, path: Path, count: int) -> None:
        self._count = count
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(count)
        self._listener.settimeout(START_S)
        self._ends: list[Any] = []

    def accept(self) -> None:
        for _ in range(self._count):
            end, _ = self._listener.accept()
            end.settimeout(STEP_S)
            self._ends.append(end.makefile("rw"))
            end.close()  # with its file

    def ask(self, what: str) -> list[float]:
        for end in self._ends:
            print(what, file=end, flush=True)
        answers = [end.readline() for end in self._ends]
        if "" in answers:
            raise SystemExit(f"a rank ended before it answered {what!r}; its message is above")
        return [float(answer) for answer in answers]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._listener.close()


def compare(folder: Path, work: Work, rounds: int) -> Compared:
    """Steps of the checkout in `folder` and of this one, in turns."""
    here = Path(__file__).resolve().parents[1]
    pythons = {"before": (folder, folder / ".ci/venv/bin/python"), "now": (here, Path(sys.executable))}
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = {}
        for name in pythons:
            ranks[name] = stack.enter_context(closing(_Ranks(temporary / name, work.ranks)))
        stack.enter_context(_started(work, {temporary / name: pythons[name] for name in pythons}))
        for version in ranks.values():
            version.accept()
        mbit = ranks["now"].ask("balance")[0] if work.hosts > 1 else None
        seconds: dict[str, list[float]] = {name: [] for name in ranks}
        cpu: dict[str, list[float]] = {name: [] for name in ranks}
        for turn in range(rounds):
            for name in ("before", "now") if turn % 2 else ("now", "before"):
                start_s = time.perf_counter()
                used = ranks[name].ask("step")
                seconds[name].append(time.perf_counter() - start_s)
                cpu[name].append(sum(used))
        for version in ranks.values():
            version.close()  # the ranks end
    return Compared(seconds["before"], seconds["now"], cpu["before"], cpu["now"], mbit)


@contextmanager
def _started(work: Work, versions: dict[Path, tuple[Path, Path]]) -> Iterator[None]:
    """torchrun for every version, on this machine or on every emulated host."""
    per_host = ["--nproc-per-node", str(work.ranks // work.hosts)]

    def command(path: Path, python: Path, folder: Path, where: list[str]) -> list[str]:
        torchrun = [
            "env",
            f"PYTHONPATH={folder}",
            "OMP_NUM_THREADS=1",
            str(python),
            "-m",
            "torch.distributed.run",
        ]
        return [*torchrun, *where, *per_host, __file__, str(path), *work.words]

    with ExitStack() as stack:
        agents: list[subprocess.Popen[Any]] = []
        if work.hosts == 1:
            for path, (folder, python) in versions.items():
                agents.append(subprocess.Popen(command(path, python, folder, ["--standalone"]), cwd=folder))
                stack.callback(agents[-1].terminate)
        else:
            from benchmarks.cluster import MASTER_PORT, Cluster

            cluster = stack.enter_context(Cluster(hosts=work.hosts, mbit=1000))
            for index, (path, (folder, python)) in enumerate(versions.items()):
                for host in range(work.hosts):
                    where = ["--nnodes", str(work.hosts), "--node-rank", str(host)]
                    where += ["--master-addr", cluster.address(0), "--master-port", str(MASTER_PORT + index)]
                    where += ["--local-addr", cluster.address(host)]
                    agents.append(cluster.start(host, command(path, python, folder, where)))
        yield
        for agent in agents:
            agent.wait(STOP_S)


def serve(path: str, part: str, hosts: int, hidden: int, layers: int, sequences: int, length: int) -> None:
    """A rank: build the step of the version that is imported, and take one whenever asked."""
    engine: Any = importlib.import_module("benchmarks.engine")
    world, options = int(os.environ["WORLD_SIZE"]), {"c": {"weights": "fsdp2"}, "d": {"weights": "streamed"}}
    config = engine.llama(hidden, layers)
    grid = engine.Grid.create((1, world, 1, 1) if part[0] in "cd" else (1, 1, 1, world), timeout_s=600)
    step = engine.ours(config, grid, engine.batch(config, sequences, length), **options.get(part[0], {}))
    for _ in range(3):
        step()
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        lines = end.makefile("rw")
        for line in lines:
            start_s = time.process_time()
            if line.strip() == "balance":
                answer = engine.balance_links(step, grid, hosts)
            else:
                step()
                answer = time.process_time() - start_s
            print(answer, file=lines, flush=True)
    engine.end_rank()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("part")
    parser.add_argument("sizes", type=int, nargs=5)
    options = parser.parse_args(arguments)
    serve(options.path, options.part, *options.sizes)


if __name__ == "__main__":
    main()
