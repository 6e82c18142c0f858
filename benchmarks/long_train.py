"""Rows of 32k tokens on eight ranks, trained: `python -m benchmarks.long --train`.

One sequence of packed documents is the batch of a step, and the second half of a document repeats the first. The losses of a run whose
eight ranks share it are those of stock PyTorch in one process, document by document; a run that stops with four ranks a sequence goes on with
one (tensor axes alone) and with eight, from its checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ranks import RankPool
from benchmarks.stock import Stock
from fourfold.checkpoint import Checkpoints
from fourfold.config.run_file import from_dict
from fourfold.config.schema import RunConfig
from fourfold.data.manifest import DatasetManifest
from fourfold.data.shards import ShardWriter, token_dtype
from fourfold.data.tokenizer import TokenizerInfo
from fourfold.mesh.grid import Grid
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.recovery.stop import StopRequest

LOSS_BAR = 1e-4  # relative, at each step
VOCABULARY = 256
HANG_S = 3600.0
# (grid, ranks that share a sequence)
EIGHT, FOUR, ONE = ((1, 8, 1, 1), 8), ((1, 4, 1, 2), 4), ((1, 1, 2, 4), 1)


def write_run(folder: Path, length: int, steps: int) -> dict[str, Any]:
    """The values of a run config, its data and its model in ``folder``."""
    rng = np.random.default_rng(0)
    shards = {}
    for split, left in (("train", (steps + 1) * length), ("validation", length)):
        (folder / "data" / split).mkdir(parents=True)
        writer = ShardWriter(folder / "data", f"{split}/000000", token_dtype(VOCABULARY), 1 << 24)
        while left > 0:
            half = rng.integers(1, VOCABULARY, rng.integers(length // 64, length // 6))
            writer.add(np.concatenate([half, half]))
            left -= 2 * len(half)
        writer.close()
        shards[split] = writer.shards
    DatasetManifest(TokenizerInfo("a", VOCABULARY, 0), "b", 0, shards).save(folder / "data")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return {
        "model": {"pretrained": str(folder / "model")},
        "data": {"sources": [{"path": str(folder / "data")}], "sequence_length": length},
        "batch": {"tokens": length},
        "optimizer": {"lr": 2e-3},
        "schedule": {"steps": steps, "warmup_steps": min(5, steps)},
        "engine": {"precision": "fp32", "activation_checkpointing": "selective"},
        "evaluation": {"sequences": 0},
        "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": steps},
        "logging": {"folder": str(folder / "logs"), "every_steps": steps},
    }


def on(values: dict[str, Any], place: tuple[tuple[int, int, int, int], int], folder: Path) -> RunConfig:
    shape, share = place
    grid = dict(zip(("data", "z", "y", "x"), shape, strict=True))
    checkpoints = {**values["checkpoints"], "folder": str(folder)}
    batch = {**values["batch"], "sequence_ranks": share}
    return from_dict({**values, "grid": grid, "batch": batch, "checkpoints": checkpoints})


class OneByOne(nn.Module):
    """A model of transformers that is given the documents of packed rows one by one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, use_cache: bool = False
    ) -> SimpleNamespace:
        documents = []
        for *row, at in zip(input_ids, labels, position_ids, strict=True):
            begins = (at == 0).nonzero().flatten()[1:]
            documents += zip(*(tensor.tensor_split(begins) for tensor in row), strict=True)
        count = sum(int((wanted[1:] != -100).sum()) for _, wanted in documents)
        losses = [
            self.model(
                input_ids=ids[None], labels=wanted[None], num_items_in_batch=count, use_cache=False
            ).loss
            for ids, wanted in documents
            if bool((wanted[1:] != -100).any())
        ]
        return SimpleNamespace(loss=torch.stack(losses).sum())


class Losses(Callback):
    """The loss of each step; asks for a stop before one of them, which is the last."""

    def __init__(self, stop_at: int | None, request: StopRequest) -> None:
        self.by_step: dict[int, float] = {}
        self._stop_at, self._request = stop_at, request

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.by_step[result.step] = float(result.loss)
        if result.step + 1 == self._stop_at and trainer.grid.mesh.get_rank() == 0:
            self._request.request()


def train_rank(run: RunConfig, stop_at: int | None = None, fault: str | None = None) -> dict[int, float]:
    """Train on this rank, from the newest checkpoint if there is one; every rank runs this."""
    from benchmarks.long import injected  # which imports this module

    torch.set_num_threads(1)
    request = StopRequest()
    losses = Losses(stop_at, request)
    grid = Grid.create(run.shape, sequence_ranks=run.sequence_ranks, timeout_s=HANG_S)
    planted = injected(fault) if fault else nullcontext()
    with planted, Checkpoints(run.checkpoints.folder, keep_last=run.checkpoints.keep_last) as checkpoints:
        Trainer(run, grid, [losses]).train(checkpoints, request)
    request.close()
    return losses.by_step


def runs(
    values: dict[str, Any], folder: Path, steps: int, fault: str | None
) -> Iterator[tuple[str, dict[int, float]]]:
    """(name, losses by step) of each run on eight ranks."""
    half = steps // 2
    with RankPool(8, quiet=True) as pool:

        def train(
            place: tuple[tuple[int, int, int, int], int], to: str, stop_at: int | None = None
        ) -> dict[int, float]:
            run = on(values, place, folder / to)
            found, *_ = pool.run(train_rank, 8, run, stop_at, fault, timeout_s=HANG_S)
            return found

        yield "8 ranks a sequence", train(EIGHT, "whole")
        first = train(FOUR, "stopped", half)
        yield f"4 ranks a sequence, stopped after {half} steps", first
        for name, place in (("1 rank", ONE), ("8 ranks", EIGHT)):
            shutil.copytree(folder / "stopped", folder / name)
            yield f"resumed with {name} a sequence", train(place, name)


def check(length: int, steps: int, fault: str | None = None) -> int:
    """Train all of them; 1 if a loss is further from that of one process than the bar, or a step is missing."""
    start_s = time.perf_counter()
    failed, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = write_run(folder, length, steps)
        expected = dict(Stock(on(values, ((1, 1, 1, 1), 1), folder / "none"), OneByOne).losses())
        said = f"{expected[1]:.4f} at step 1, {expected[steps]:.4f} at step {steps}"
        print(f"{length:,} tokens a step, one process: loss {said}", flush=True)
        for run, losses in runs(values, folder, steps, fault):
            wanted = range(steps // 2 + 1, steps + 1) if "resumed" in run else range(1, steps + 1)
            wanted = range(1, steps // 2 + 1) if "stopped" in run else wanted
            off = max(abs(losses.get(step, np.inf) / expected[step] - 1) for step in wanted)
            is_good = off <= LOSS_BAR and list(losses) == list(wanted)
            failed += not is_good
            worst = max(worst, off)
            steps_of = f"steps {min(losses)} to {max(losses)}" if losses else "no step"
            print(f"{run}: {steps_of}, losses within {off:.1e}{'' if is_good else '  FAILED'}", flush=True)
    print(
        f"long --train: {failed} failures, worst loss off by {worst:.1e} of {LOSS_BAR:g}, {time.perf_counter() - start_s:.0f} s"
    )
    return 1 if failed else 0
