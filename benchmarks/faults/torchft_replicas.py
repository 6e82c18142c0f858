"""One of two replicas is killed again and again: the other goes on, and nothing of the run is lost.

Each replica is a job of its own, 2 ranks on grid (1,1,1,2); `torchft_lighthouse` runs beside them as the documentation
says. All ranks of one replica are killed at a drawn instant, and it is started again: it copies the run from the other.
The same run on the plain grid (2,1,1,2), undisturbed, is what both have to end like.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.faults.row import Row
from fourfold.ranks import RankError, RankPool
from fourfold.train.config import RunConfig, from_dict
from fourfold.train.data.manifest import Manifest
from fourfold.train.data.shards import ShardWriter, token_dtype
from fourfold.train.data.tokenizer import TokenizerFacts
from fourfold.train.replicas import hash_of
from fourfold.train.run import train
from fourfold.train.trainer import Callback, StepResult, Trainer

# As in docs/reliability.md.
LIGHTHOUSE = "--min_replicas 1 --heartbeat_timeout_ms 1000 --quorum_tick_ms 50 --join_timeout_ms 1000"
GRID, RANKS, REPLICAS = {"z": 1, "y": 1, "x": 2}, 2, 2
STALL_BAR_S = 3.0
VOCABULARY, LENGTH, SEQUENCES = 64, 32, 8
STEP_S = (
    0.08  # a step takes at least this, as one of a real model does: a replica has to come back before the end
)


def run(small: bool) -> Iterator[Row]:
    kills = 1 if small else 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        undisturbed = on_grid(folder / "plain", folder, steps(kills))
        killed, survivor, hashes, restarts_s = disturbed(folder, kills)
        yield from rows(kills, undisturbed, killed, survivor, hashes, restarts_s)


def steps(kills: int) -> int:
    return 40 + 60 * kills


def rows(
    kills: int,
    undisturbed: tuple[list[dict[str, float]], int],
    killed: int,
    survivor: list[dict[str, float]],
    hashes: list[list[int]],
    restarts_s: list[float],
) -> Iterator[Row]:
    what = f"torchft, 2 replicas, one killed {kills} times"
    gaps_s = [b["time"] - a["time"] for a, b in pairwise(survivor)]
    stall_s = max(gaps_s)
    alone = sum(line["replicas"] == 1 for line in survivor)
    yield Row(
        f"{what}: the longest time between two steps of the survivor",
        f"{stall_s:.2f} s",
        f"{STALL_BAR_S:g} s",
        stall_s <= STALL_BAR_S and killed == kills,
        "0.96 s (torchft alone, one kill)",
    )
    wanted = list(range(1, steps(kills) + 1))
    done = [int(line["step"]) for line in survivor]
    yield Row(
        f"{what}: steps lost, of {len(wanted)}",
        f"{len(set(wanted) - set(done))} ({alone} done alone; back after {max(restarts_s):.1f} s at most)",
        "0",
        done == wanted and killed == kills,
        "0 (torchft alone)",
    )
    (reference, weights) = undisturbed
    ends = [set(ranks) for ranks in zip(*hashes, strict=True)]
    yield Row(
        f"{what}: weights of both replicas at the end, by rank",
        "equal" if all(len(end) == 1 for end in ends) else "not equal",
        "equal",
        all(len(end) == 1 for end in ends),
    )
    far = max(
        abs(mine["loss"] - other["loss"]) / other["loss"]
        for mine, other in zip(survivor, reference, strict=True)
    )
    same = hashes[0] == weights
    yield Row(
        f"{what}: the loss against the plain grid's, undisturbed",
        f"{far:.1e} apart at most, weights {'bit-equal' if same else 'not bit-equal'}",
        "1%",
        far <= 0.01,
    )


def disturbed(folder: Path, kills: int) -> tuple[int, list[dict[str, float]], list[list[int]], list[float]]:
    """(kills that hit, the survivor's steps, the hashes of the weights of each replica's ranks, seconds to come back)."""
    with lighthouse() as address:
        jobs = [Job(folder, number, address, steps(kills)) for number in range(REPLICAS)]
        for job in jobs:
            job.start()
        try:
            killed, back_s = 0, []
            choose = random.Random(0)
            for _ in range(kills):
                # Both are there, and have been for a moment.
                wait_until(lambda: all(job.replicas() == REPLICAS for job in jobs), 60.0)
                time.sleep(choose.uniform(0.2, 1.0))
                start_s = time.monotonic()
                killed += jobs[1].kill()
                wait_until(lambda: jobs[0].replicas() == 1, 30.0)
                wait_until(lambda: jobs[0].replicas() == REPLICAS, 60.0)
                back_s.append(time.monotonic() - start_s)
            (folder / "hurry").touch()
            hashes = [job.result() for job in jobs]
        finally:
            for job in jobs:
                job.close()
    return killed, read_steps(jobs[0].folder), hashes, back_s


class Job:
    """A replica and its launcher: when its ranks die they are started again."""

    def __init__(self, folder: Path, number: int, address: str, count: int) -> None:
        self.folder = folder / f"replica-{number}"
        self.folder.mkdir()
        reliability = {"lighthouse": address, "replica": number, "timeout_s": 20.0}
        self._run = run_of(folder, folder / "shared", count, {**GRID, "data": REPLICAS}, reliability)
        self._pool = RankPool(RANKS, quiet=True)
        self._hashes: list[int] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._launch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _launch(self) -> None:
        while not self._closed and self._hashes is None:
            try:
                self._hashes = self._pool.run(one_rank, RANKS, self._run, self.folder, timeout_s=600.0)
            except RankError as error:
                with (self.folder / "deaths").open("a") as file:
                    file.write(f"{error}\n")

    def replicas(self) -> int:
        """How many there were in its newest step."""
        found = read_steps(self.folder)
        return int(found[-1]["replicas"]) if found else 0

    def kill(self) -> bool:
        """All ranks of it, one right after the other; was each of them alive?"""
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
            raise RuntimeError(f"replica {self.folder.name} did not end")
        return self._hashes

    def close(self) -> None:
        self._closed = True
        if self._thread.is_alive():
            self.kill()
            self._thread.join(10.0)
        self._pool.close()


class Record(Callback):
    """One line a step, there at once; and the pace."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._begun_s = folder, time.monotonic()
        self.weights = 0

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.is_first:
            line = {"step": result.step, "time": time.monotonic(), "loss": float(result.loss)}
            line["replicas"] = result.figures.get("replicas", 1.0)
            with (self._folder / "steps").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if not (self._folder.parent / "hurry").exists():
            time.sleep(max(0.0, self._begun_s + STEP_S - time.monotonic()))
        self._begun_s = time.monotonic()

    def on_end(self, trainer: Trainer) -> None:
        self.weights = int(hash_of(trainer.model.parameters()))


def one_rank(run: RunConfig, folder: Path) -> int:
    """Train; the hash of this rank's weights at the end."""
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    record = Record(folder)
    train(run, [record])
    return record.weights


def on_grid(where: Path, folder: Path, count: int) -> tuple[list[dict[str, float]], list[int]]:
    """The same run on the plain grid: (its steps, the hashes of the weights of the first replica's ranks)."""
    where.mkdir()
    (folder / "hurry").touch()
    with RankPool(REPLICAS * RANKS, quiet=True) as pool:
        plain = run_of(folder, where, count, {**GRID, "data": REPLICAS}, {})
        hashes = pool.run(one_rank, REPLICAS * RANKS, plain, where)
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
            raise TimeoutError(f"nothing came of it within {seconds:g} s")
        time.sleep(0.01)


@contextmanager
def lighthouse() -> Iterator[str]:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    program = shutil.which(
        "torchft_lighthouse", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert program is not None
    process = subprocess.Popen(
        [program, "--bind", f"[::]:{port}", *LIGHTHOUSE.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{socket.gethostname()}:{port}"
    finally:
        process.kill()
        process.wait()


def write_data(folder: Path) -> None:
    """Drawn text in which some tokens are more frequent than others, so that there is something to learn; a drawn model."""
    drawn = np.random.default_rng(0)
    shards = {}
    for split, documents in (("train", 400), ("validation", 8)):
        (folder / "data" / split).mkdir(parents=True)
        writer = ShardWriter(folder / "data", f"{split}/000000", token_dtype(VOCABULARY), 1 << 20)
        for size in drawn.integers(40, 400, documents):
            writer.add(1 + drawn.zipf(1.5, size) % (VOCABULARY - 1))
        writer.close()
        shards[split] = writer.shards
    Manifest(TokenizerFacts("drawn", VOCABULARY, 0), "drawn", 0, shards).save(folder / "data")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))


def run_of(
    folder: Path, where: Path, count: int, grid: dict[str, int], reliability: dict[str, Any]
) -> RunConfig:
    return from_dict(
        {
            "model": {"config": str(folder / "config.json")},
            "data": {"sources": [{"path": str(folder / "data")}], "sequence_length": LENGTH},
            "grid": grid,
            "batch": {"tokens": SEQUENCES * LENGTH},
            "optimizer": {"lr": 3e-3},
            "schedule": {"steps": count, "warmup_steps": 10},
            "engine": {"precision": "fp32"},
            "checkpoints": {"folder": str(where / "checkpoints"), "every_steps": 50, "keep": 2},
            "evaluation": {"every_steps": None, "sequences": 2},
            "logging": {"folder": str(where / "logs"), "every_steps": 1, "tensorboard": False},
            "reliability": reliability,
        }
    )
