"""Overhead of a run: `fourfold train` compared with a bare loop, and saving compared with not saving.

Both loops train the same model on the same rows in one process, alternating steps, so that other load on the machine affects
both equally. The run is complete: data, clipping, console, metrics and TensorBoard. The bare loop is stock PyTorch on batches
that are in memory.

    tokens/s of the run at least 0.97 of the bare loop's
    ten steps, at the start of which a checkpoint is saved, at most 1.05 times ten steps without

    python -m benchmarks.throughput
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.faults.traced_run import write_data
from benchmarks.stock import Stock
from fourfold.checkpoint import Checkpoints
from fourfold.config.run_file import from_dict
from fourfold.config.schema import RunConfig
from fourfold.mesh.grid import Grid
from fourfold.mesh.rendezvous import join_world
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Callback, StepResult, Trainer

RATE = 0.97
SAVING = 1.05
EVERY = 10  # steps between two checkpoints


def write_run(folder: Path, options: argparse.Namespace) -> RunConfig:
    """Random tokens and a random model: only time is measured."""
    vocabulary = 8192
    random = np.random.default_rng(0)
    documents = {
        split: [random.integers(1, vocabulary, size) for size in random.integers(200, 2000, count)]
        for split, count in (("train", 400), ("validation", 20))
    }
    write_data(folder / "data", vocabulary, documents)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return from_dict(
        {
            "model": {"pretrained": str(folder / "model")},
            "data": {"sources": [{"path": str(folder / "data")}], "sequence_length": options.length},
            "batch": {"tokens": options.length * options.sequences},
            "schedule": {"steps": options.steps, "warmup_steps": 1},
            "engine": {"precision": "fp32"},
            "evaluation": {"every_steps": None, "sequences": 1},
            "logging": {"folder": str(folder / "logs"), "every_steps": 1},
        }
    )


class AlternateBare(Callback):
    """Does one step of the bare loop after each step of the run; the seconds of both."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._batches = [stock.batch(step) for step in range(stock.run.schedule.steps)]
        self.run_s: list[float] = []
        self.bare_s: list[float] = []
        self._returned_s: float | None = None

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        now_s = time.perf_counter()
        if self._returned_s is not None:
            self.run_s.append(now_s - self._returned_s)
        start_s = time.perf_counter()
        self._stock.step(self._batches[result.step - 1])
        end_s = time.perf_counter()
        if self._returned_s is not None:
            self.bare_s.append(end_s - start_s)
        self._returned_s = time.perf_counter()


class AlternateSaves(Callback):
    """Alternates ten steps that start with a checkpoint and ten without; the seconds of both."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._start_s = 0.0
        self.saving_s: list[float] = []
        self.plain_s: list[float] = []
        self.saves: list[int] = []

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % EVERY:
            return
        blocks = result.step // EVERY  # finished; the first is warm-up
        if blocks > 1:
            (self.saving_s if blocks % 2 == 0 else self.plain_s).append(time.perf_counter() - self._start_s)
        if blocks % 2 == 0:
            self._checkpoints.wait()  # nothing may be written during a block without a save
        self._start_s = time.perf_counter()
        if blocks % 2 == 1 and not trainer.is_done:
            self._checkpoints.save(trainer.training)
            self.saves.append(result.step)


def alone(run: RunConfig, *callbacks: Callback) -> None:
    """Train as `fourfold train` does, with additional callbacks; its output is discarded."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        Trainer(run, Grid.create((1, 1, 1, 1)), [*callbacks_of(run), *callbacks]).train()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--steps", type=int, default=101)
    options = parser.parse_args(arguments)
    join_world("cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = write_run(folder, options)
        both = AlternateBare(Stock(run))
        alone(run, both)
        rate = statistics.median(bare / ours for bare, ours in zip(both.bare_s, both.run_s, strict=True))
        tokens = run.batch.tokens
        ours, bare = tokens / statistics.median(both.run_s), tokens / statistics.median(both.bare_s)
        print(f"threads {torch.get_num_threads()}, {len(both.run_s)} steps each, alternating")
        print(
            f"fourfold train {ours:,.0f} tokens/s, bare loop {bare:,.0f}: {rate:.3f} (threshold {RATE})",
            flush=True,
        )

        with Checkpoints(folder / "checkpoints", keep_last=2) as checkpoints:
            saves = AlternateSaves(checkpoints)
            alone(run, saves)
        cost = statistics.median(a / b for a, b in zip(saves.saving_s, saves.plain_s, strict=False))
        with_s, without_s = statistics.median(saves.saving_s), statistics.median(saves.plain_s)
        print(
            f"{EVERY} steps with a checkpoint {with_s:.2f} s, without {without_s:.2f} s, {len(saves.saves)} saves: "
            f"{cost:.3f} (threshold {SAVING})"
        )
    dist.destroy_process_group()
    holds = rate >= RATE and cost <= SAVING
    print(f"throughput: {'holds' if holds else 'does NOT hold'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
