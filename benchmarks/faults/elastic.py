"""A host is disconnected during a run and returns: does the run continue without it, and then with it, by itself?

Four hosts of two ranks, each a network namespace with its own agent. One host's link is cut: the others notice, hold a new
rendezvous and continue on three hosts with the layout that the planner chooses for six ranks. The link is restored: the
host's agent rejoins, the ranks save, and continue on four hosts. The global batch and the order of samples do not change.

    python -m benchmarks.faults.elastic RUN.toml      # one rank, under an agent
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import cluster
from benchmarks.faults import traced_run
from benchmarks.faults.row import Row
from benchmarks.faults.traced_run import Line
from fourfold.planner.inputs.cluster import LIBRARIES, Cluster, Device, Links, to_toml
from fourfold.processes import CONTINUE

RANKS_PER_HOST, SEQUENCES = 2, 24
STEP_S = 0.1  # minimum of a step; otherwise there would be thousands
TIMEOUT_S = 8.0  # of collectives
STEPS = 30  # minimum before, without the host, and after
FOREVER = 100_000
LOSS_LIMIT = 0.01
PORT = 29600
LIMIT_S = 600.0
OTHERS = "none of the systems that we read re-plans a layout"


def run(small: bool) -> Iterator[Row]:
    hosts = 2 if small else 4
    name = f"one of {hosts} hosts is disconnected and returns"
    if reason := cluster.why_not():
        yield Row(name, reason, "network namespaces", False, OTHERS)
        return
    steps = 8 if small else STEPS
    with tempfile.TemporaryDirectory(prefix="fourfold-elastic-") as folder:
        yield from rows(name, Path(folder), hosts, steps)


def rows(name: str, folder: Path, hosts: int, steps: int) -> Iterator[Row]:
    with cluster.Cluster(hosts=hosts, mbit=None) as network:
        disturbed = Run(folder / "disturbed", network, FOREVER)
        disturbed.trains(steps, hosts)
        attempt = disturbed.steps()[-1][
            "attempt"
        ]  # earlier attempts may have started before all hosts had joined
        network.cut(hosts - 1)
        cut_s = time.time()
        disturbed.trains(steps, hosts - 1)
        network.mend(hosts - 1)
        mended_s = time.time()
        disturbed.trains(steps, hosts)
        codes = disturbed.stop()
    lines = [line for line in disturbed.steps() if line["attempt"] >= attempt]
    last = lines[-1]["step"]
    grids = disturbed.grids(attempt)
    yield Row(
        f"{name}: the run continues on {hosts - 1} with another layout, and then on {hosts}",
        " -> ".join(grids) + f"; agents exit with {codes}",
        "by itself",
        len(grids) == 3 and grids[0] == grids[2] and set(codes) == {CONTINUE},
        OTHERS,
    )
    without = next(line["time"] for line in lines if line["ranks"] == RANKS_PER_HOST * (hosts - 1))
    back = next(
        line["time"] for line in lines if line["time"] > without and line["ranks"] == RANKS_PER_HOST * hosts
    )
    again = len(lines) - len({line["step"] for line in lines})
    useful_s = sum(step_seconds(lines).values())
    elapsed_s = lines[-1]["time"] - lines[0]["time"]
    yield Row(
        f"{name}: goodput, useful fraction of all seconds",
        f"{useful_s / elapsed_s:.0%} of {elapsed_s:.0f} s; first step {without - cut_s:.1f} s after the cut (of which "
        f"{TIMEOUT_S:g} s timeout), {back - mended_s:.1f} s after the return; {again} steps repeated",
        "printed",
        True,
        ">90 % (Llama 3), 97 % (ByteRobust), with hours between failures",
    )
    with cluster.Cluster(hosts=hosts, mbit=None) as network:
        undisturbed = Run(folder / "undisturbed", network, last)
        codes = undisturbed.end()
    mine, theirs = disturbed.losses(), undisturbed.losses()
    worst = max((abs(mine[s] - theirs[s]) / theirs[s] for s in theirs if s in mine), default=1.0)
    yield Row(
        f"{name}: the loss, compared with the undisturbed run",
        f"at most {worst:.2%} apart over {len(theirs)} steps",
        f"<= {LOSS_LIMIT:.0%}",
        mine.keys() == theirs.keys() and worst <= LOSS_LIMIT and not any(codes),
    )


def step_seconds(lines: list[Line]) -> dict[int, float]:
    """Seconds of each step, from its last execution; the first step of an attempt is left out."""
    seconds: dict[int, float] = {}
    for before, line in itertools.pairwise(lines):
        if before["attempt"] == line["attempt"] and line["step"] == before["step"] + 1:
            seconds[line["step"]] = line["time"] - before["time"]
    return seconds


class Run:
    """A run with an agent on each host."""

    def __init__(self, folder: Path, network: cluster.Cluster, steps: int) -> None:
        self._network, self._logs = network, folder / "logs"
        folder.mkdir(parents=True)
        machines = folder / "cluster.toml"
        machines.write_text(to_toml(emulated()))
        file = traced_run.write(
            folder,
            sequences=SEQUENCES,
            grid={"cluster": str(machines)},
            schedule={"steps": steps},
            checkpoints={"every_steps": 5},
            reliability={"timeout_s": TIMEOUT_S},
        )
        self._log = (folder / "agents.log").open("wb")
        self._agents = [self._start(host, file) for host in range(network.hosts)]

    def _start(self, host: int, file: Path) -> subprocess.Popen[bytes]:
        hosts, address = self._network.hosts, self._network.address
        command = [sys.executable, "-m", "fourfold.launch.agent", f"--nnodes={hosts - 1}:{hosts}"]
        command += [
            f"--nproc-per-node={RANKS_PER_HOST}",
            "--max-restarts=10",
            "--rdzv-backend=c10d",
            "--rdzv-id=run",
        ]
        command += [f"--rdzv-endpoint={address(0)}:{PORT}", f"--local-addr={address(host)}"]
        command += [
            f"--rdzv-conf=is_host={int(host == 0)},last_call_timeout=3,read_timeout=10,keep_alive_interval=3"
        ]
        command += ["-m", "benchmarks.faults.elastic", str(file)]
        return self._network.start(host, ["sh", "-c", 'exec "$@" 2>&1', "sh", *command], self._log)

    def trains(self, steps: int, hosts: int) -> None:
        """Wait until N more steps are done with this number of hosts."""
        end_s = time.monotonic() + LIMIT_S
        before = len(self.steps())
        while sum(step["ranks"] == RANKS_PER_HOST * hosts for step in self.steps()[before:]) < steps:
            if time.monotonic() > end_s or self._agents[0].poll() is not None:
                raise RuntimeError(
                    f"no {steps} steps with {hosts} hosts in {LIMIT_S:g} s; see {self._log.name}"
                )
            time.sleep(0.1)

    def stop(self) -> list[int]:
        for agent in self._agents:
            agent.terminate()
        return self.end()

    def end(self) -> list[int]:
        return [agent.wait(LIMIT_S) for agent in self._agents]

    def steps(self) -> list[Line]:
        """The steps of rank 0, in the order of execution."""
        return [line for line in traced_run.traces(self._logs).get(0, []) if "step" in line]

    def grids(self, attempt: int) -> list[str]:
        """The different grids since an attempt, in order."""
        found: list[str] = []
        for line in traced_run.traces(self._logs).get(0, []):
            if "grid" in line and line["attempt"] >= attempt and line["grid"] != (found or [""])[-1]:
                found.append(line["grid"])
        return found

    def losses(self) -> dict[int, float]:
        return {line["step"]: float.fromhex(line["loss"]) for line in self.steps()}


def emulated() -> Cluster:
    """The emulated hosts in round numbers; only the ranking of layouts matters, not their seconds."""
    device = Device(
        "a core", best_tflops=0.05, memory_gib=1.0, memory_tbps=0.01, multiprocessors=1, launch_us=20.0
    )
    links = Links(devices_per_node=RANKS_PER_HOST, device_gbps=1.0, node_gbps=0.5)
    return Cluster("emulated hosts", device, links, dataclasses.replace(LIBRARIES["gloo"]))


# -- one rank ---------------------------------------------------------------------------------------------------------


def rank_main(file: Path) -> int:
    from fourfold.config.run_file import load_run
    from fourfold.train.run import train

    config = load_run(file)
    # Attempts are identified by their start time, since agents that joined later count fewer.
    trace = traced_run.Trace(config, int(time.time() * 1000), slow_s=STEP_S)
    return 0 if train(config, [trace]) else CONTINUE


if __name__ == "__main__":
    sys.exit(rank_main(Path(sys.argv[1])))
