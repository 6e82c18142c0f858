"""A small run: random text, a model with weights in a folder, and the same training in stock PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.stock import Stock
from fourfold.checkpoint import Checkpoints
from fourfold.config.run_file import from_dict
from fourfold.config.schema import RunConfig
from fourfold.mesh.grid import Grid
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.recovery.stop import StopRequest
from tests import prepared
from tests.models import VOCABULARY, build

LENGTH = 16
Shape = tuple[int, int, int, int]


def write_run(folder: Path, kind: str = "llama", **changes: Any) -> dict[str, Any]:
    """The values of a run config: a model and data in ``folder``, 6 steps of 8 sequences."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, VOCABULARY, size) for size in rng.integers(3, 60, 60)]
    prepared.write(folder / "data", documents[:50], documents[50:])
    build(kind, **changes).save_pretrained(folder / "model")
    return {
        "seed": 3,
        "model": {"pretrained": str(folder / "model")},
        "data": {"sources": [{"path": str(folder / "data")}], "sequence_length": LENGTH},
        "batch": {"tokens": 8 * LENGTH},
        "optimizer": {"lr": 1e-2, "eps": 1e-4, "grad_clip_norm": 0.5},
        "schedule": {"steps": 6, "warmup_steps": 2},
        "engine": {"precision": "fp32"},
        "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 2},
        "evaluation": {"sequences": 8},
        "logging": {"folder": str(folder / "logs"), "every_steps": 1},
    }


def on(values: dict[str, Any], shape: Shape, **sections: dict[str, Any]) -> RunConfig:
    """The run on a grid, with fields changed."""
    changed = {name: {**values.get(name, {}), **fields} for name, fields in sections.items()}
    return from_dict(values | changed | {"grid": dict(zip(("data", "z", "y", "x"), shape, strict=True))})


class Losses(Callback):
    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.by_step[result.step] = float(result.loss)


class StopAt(Callback):
    """Requests a stop on one rank."""

    def __init__(self, step: int, rank: int, request: StopRequest) -> None:
        self._step, self._rank, self._request = step, rank, request

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self._step and torch.distributed.get_rank() == self._rank:
            self._request.request()


def train(
    run: RunConfig, *callbacks: Callback, saves: bool = False, stop_at: int | None = None
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """(the loss by step, this rank's weights at the end)."""
    losses = Losses()
    shape = (run.grid.data, run.grid.z, run.grid.y, run.grid.x)
    trainer = Trainer(run, Grid.create(shape, sequence_ranks=run.sequence_ranks), [*callbacks, losses])
    request = StopRequest()
    if stop_at is not None:
        trainer.callbacks.append(StopAt(stop_at, trainer.grid.mesh.size() - 1, request))
    if saves:
        with Checkpoints(run.checkpoints.folder, keep_last=run.checkpoints.keep_last) as checkpoints:
            trainer.train(checkpoints, request)
    else:
        trainer.train(None, request)
    request.close()
    return losses.by_step, {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}


def stock_losses(run: RunConfig) -> dict[int, float]:
    return dict(Stock(run).losses())
