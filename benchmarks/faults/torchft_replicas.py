"""One of two replicas is killed repeatedly: the other continues, and no step of the run is lost.

Each replica is a separate job of 2 ranks on grid (1,1,1,2); `torchft_lighthouse` runs alongside them as documented. All
ranks of one replica are killed at a random instant and restarted: they copy the state from the other replica. Both have to
end as the same undisturbed run on the plain grid (2,1,1,2). With ``broken`` a replica returns without the weights of the
other, and the lighthouse has its default timeouts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.faults import traced_run
from benchmarks.faults.row import Row
from benchmarks.ranks import RankError, RankPool
from fourfold.config.run_file import load_run
from fourfold.config.schema import RunConfig
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.recovery import peer_copy
from fourfold.train.resilience.replica_check import weight_hash
from fourfold.train.run import train

# As in docs/reliability.md.
LIGHTHOUSE = "--min_replicas 1 --heartbeat_timeout_ms 1000 --quorum_tick_ms 50 --join_timeout_ms 1000"
GRID, RANKS, REPLICAS = {"z": 1, "y": 1, "x": 2}, 2, 2
MAX_STALL_S = 3.0
PRELOAD = ("fourfold.train.run", "fourfold.train.recovery.torchft_manager", "torchft")
STEP_S = 0.08  # minimum, as with a real model: a replica has to return before the end
RESTART_S = 1.5  # that a launcher takes to restart the ranks


@dataclass(frozen=True)
class Outcome:
    """The result: steps as written by `Record`, and hashes of the weights by rank of a replica."""

    kills: int  # that hit a running replica
    survivor: list[dict[str, float]]
    other: list[dict[str, float]]
    hashes: list[list[int]]  # of each replica
    back_s: list[float]  # from each kill until both replicas were training
    undisturbed: list[dict[str, float]]
    undisturbed_hashes: list[int]

    @property
    def stall_s(self) -> float:
        return max(b["time"] - a["time"] for a, b in pairwise(self.survivor))

    @property
    def lost(self) -> int:
        """Steps that no replica did, or the survivor twice. With a late heartbeat it is dropped itself, and copies a step."""
        mine, others = ({*(line["step"] for line in lines)} for lines in (self.survivor, self.other))
        twice = len(self.survivor) - len(mine)
        return twice + sum(line["step"] not in mine | others for line in self.undisturbed)

    @property
    def alone(self) -> int:
        return sum(line["replicas"] == 1 for line in self.survivor)

    @property
    def is_equal(self) -> bool:
        """Do both replicas have the same weights, bit for bit?"""
        return all(hashes == self.hashes[0] for hashes in self.hashes)

    @property
    def is_undisturbed(self) -> bool:
        """Are they also equal to the undisturbed run?"""
        return self.is_equal and self.hashes[0] == self.undisturbed_hashes

    @property
    def loss_apart(self) -> float:
        wanted = {line["step"]: line["loss"] for line in self.undisturbed}
        return max(
            abs(line["loss"] - wanted[line["step"]]) / wanted[line["step"]]
            for line in (*self.survivor, *self.other)
        )


def run(small: bool, broken: bool = False) -> Iterator[Row]:
    kills = 1 if small else 10
    if lighthouse_program() is None:
        reason = "there is no torchft_lighthouse; pip install 'fourfold[torchft]'"
        yield Row(f"torchft, 2 replicas, one killed {kills} times", reason, "torchft", False)
        return
    found = measure(kills, broken)
    what = f"torchft, 2 replicas, one killed {found.kills} times"
    all_hit = found.kills == kills
    yield Row(
        f"{what}: the longest time between two steps of the survivor",
        f"{found.stall_s:.2f} s",
        f"<= {MAX_STALL_S:g} s",
        found.stall_s <= MAX_STALL_S and all_hit,
        "0.96 s (torchft alone, 1 kill)",
    )
    yield Row(
        f"{what}: steps lost, of {len(found.undisturbed)}",
        f"{found.lost} ({found.alone} done alone, back after {median(found.back_s):.1f} s, {max(found.back_s):.1f} at most)",
        "0",
        found.lost == 0 and all_hit,
        "0; back after 3.1 s (torchft alone)",
    )
    yield Row(
        f"{what}: weights of both at the end",
        "bit-equal" if found.is_equal else "not equal",
        "bit-equal",
        found.is_equal,
        "sums equal (torchft alone)",
    )
    yield Row(
        f"{what}: compared with the undisturbed plain grid",
        f"loss difference at most {found.loss_apart:.1e}, weights {'bit-equal' if found.is_undisturbed else 'not bit-equal'}",
        "loss 1%",
        found.loss_apart <= 0.01,
    )


def measure(kills: int, broken: bool = False) -> Outcome:
    os.environ.setdefault("RUST_LOG", "warn")  # torchft's; read when it is imported
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = 10 + 60 * kills
        undisturbed, hashes = on_plain_grid(folder, steps)
        # With the lighthouse's default timeouts a replica counts as running for 5 s after its end.
        with lighthouse("--min_replicas 1" if broken else LIGHTHOUSE) as address:
            jobs = [Job(folder, number, address, steps, broken) for number in range(REPLICAS)]
            try:
                for job in jobs:
                    job.start()
                    wait_until(job.replicas, 180.0)  # the survivor has to do every step
                hits, back_s = disturb(jobs, kills)
                (folder / "hurry").touch()
                ends = [job.result() for job in jobs]
            finally:
                for job in jobs:
                    job.close()
        survivor, other = (read_steps(job.folder) for job in jobs)
        return Outcome(hits, survivor, other, ends, back_s, undisturbed, hashes)


def disturb(jobs: list[Job], kills: int) -> tuple[int, list[float]]:
    """Kill the last replica at random instants; (how often it was running, seconds until all were training again)."""
    choose = random.Random(0)
    hits, back_s = 0, []
    for _ in range(kills):
        wait_until(lambda: all(job.replicas() == REPLICAS for job in jobs), 60.0)
        time.sleep(choose.uniform(0.2, 1.0))
        hits += jobs[-1].kill()
        start_s = time.monotonic()
        wait_until(partial(jobs[-1].has_stepped_since, start_s), 60.0)
        back_s.append(time.monotonic() - start_s)
    return hits, back_s


class Job:
    """A replica and its launcher, which restarts its ranks when they die."""

    def __init__(self, folder: Path, number: int, address: str, steps: int, broken: bool) -> None:
        self.folder = folder / f"replica-{number}"
        self.folder.mkdir()
        reliability = {"torchft_lighthouse": address, "replica": number, "timeout_s": 20.0}
        self._run = run_of(folder, folder / "shared", steps, {**GRID, "data": REPLICAS}, reliability)
        self._broken = broken
        self._pool = RankPool(RANKS, quiet=True, preload=PRELOAD)
        self._hashes: list[int] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._launch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _launch(self) -> None:
        while not self._closed and self._hashes is None:
            try:
                self._hashes = self._pool.run(
                    one_rank, RANKS, self._run, self.folder, self._broken, timeout_s=600.0
                )
            except RankError as error:
                with (self.folder / "log").open("a") as file:
                    file.write(f"{error}\n")
                time.sleep(RESTART_S)

    def replicas(self) -> int:
        """The number of replicas in its newest step."""
        found = read_steps(self.folder)
        return int(found[-1]["replicas"]) if found else 0

    def has_stepped_since(self, time_s: float) -> bool:
        found = read_steps(self.folder)
        return bool(found) and found[-1]["time"] > time_s

    def kill(self) -> bool:
        """Kill all of its ranks, one right after the other; was each of them alive?"""
        hit = True
        for file in sorted(self.folder.glob("pid-*")):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
                continue
            hit = False
        return hit

    def result(self) -> list[int]:
        self._thread.join(120.0)
        if self._hashes is None:
            raise RuntimeError(
                f"{self.folder.name} did not end:\n{(self.folder / 'log').read_text()[-2000:]}"
            )
        return self._hashes

    def close(self) -> None:
        self._closed = True
        if self._thread.is_alive():
            self.kill()
            self._thread.join(10.0)
        self._pool.close()


class Record(Callback):
    """Writes one line per step immediately, and limits the speed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._begun_s = folder, time.monotonic()
        self.weights = 0

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.is_first:
            line = {"step": result.step, "time": time.monotonic(), "loss": float(result.loss)}
            line["replicas"] = result.metrics.get("replicas", 1.0)
            with (self._folder / "steps").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if not (self._folder.parent / "hurry").exists():
            time.sleep(max(0.0, self._begun_s + STEP_S - time.monotonic()))
        self._begun_s = time.monotonic()

    def on_end(self, trainer: Trainer) -> None:
        self.weights = int(weight_hash(trainer.model.parameters()))


def one_rank(run: RunConfig, folder: Path, broken: bool = False) -> int:
    """Train; the hash of this rank's weights at the end."""
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    with (folder / "log").open("a") as log:
        for output in (sys.stdout, sys.stderr):
            output.flush()
            os.dup2(log.fileno(), output.fileno())
    if broken:  # a returning replica copies the step counter, but no weights
        peer_copy._copy_into = lambda name, held, pieces: None
    record = Record(folder)
    train(run, [record])
    return record.weights


def on_plain_grid(folder: Path, steps: int) -> tuple[list[dict[str, float]], list[int]]:
    """The same run on the plain grid: (its steps, the hashes of the weights of the first replica's ranks)."""
    where, ranks = folder / "plain", REPLICAS * RANKS
    where.mkdir(parents=True)
    (folder / "hurry").touch()
    with RankPool(ranks, quiet=True, preload=PRELOAD) as pool:
        plain = run_of(folder, where, steps, {**GRID, "data": REPLICAS}, {})
        hashes = pool.run(one_rank, ranks, plain, where)
    (folder / "hurry").unlink()
    return read_steps(where), hashes[:RANKS]


def read_steps(folder: Path) -> list[dict[str, float]]:
    file = folder / "steps"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until(condition: Any, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the condition did not become true within {seconds:g} s")
        time.sleep(0.01)


def lighthouse_program() -> str | None:
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return shutil.which("torchft_lighthouse", path=search_path)


@contextmanager
def lighthouse(options: str = LIGHTHOUSE) -> Iterator[str]:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [str(lighthouse_program()), "--bind", f"[::]:{port}", *options.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{socket.gethostname()}:{port}"
    finally:
        process.kill()
        process.wait()


def run_of(
    folder: Path, where: Path, steps: int, grid: dict[str, int], reliability: dict[str, Any]
) -> RunConfig:
    """A run without dropout, whose masks depend on the assignment of rows to replicas."""
    checkpoints = {"folder": str(where / "checkpoints"), "every_steps": 50, "keep_last": 2}
    file = traced_run.write(
        folder,
        grid=grid,
        schedule={"steps": steps, "warmup_steps": 10},
        checkpoints=checkpoints,
        logging={"folder": str(where / "logs"), "every_steps": 1, "tensorboard": False},
        reliability=reliability,
    )
    (folder / "config.json").write_text(json.dumps(traced_run.MODEL | {"attention_dropout": 0.0}))
    return load_run(file)
