"""Runs with all their callbacks, on local ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist

from fourfold.checkpoint import Checkpoints
from fourfold.config.schema import RunConfig
from fourfold.mesh.grid import Grid
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.recovery.stop import StopRequest
from tests.training import Losses, StopAt


class SlowRank(Callback):
    """The last rank sleeps in each step, and between steps, where an evaluation would make the others wait for it."""

    def __init__(self, inside_s: float, between_s: float) -> None:
        self._inside_s, self._between_s = inside_s, between_s

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(self._inside_s)
        yield

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(self._between_s)
        trainer.grid.collectives.all_reduce(torch.ones(1), "z", "check").wait()


def watch(
    run: RunConfig, *before: Callback, after: Any = (), stop_at: int | None = None
) -> tuple[dict[int, float], str]:
    """(the loss by step, what was printed)."""
    losses, request = Losses(), StopRequest()
    shape = (run.grid.data, run.grid.z, run.grid.y, run.grid.x)
    printed = StringIO()
    with redirect_stdout(printed):
        trainer = Trainer(run, Grid.create(shape), [*before, *callbacks_of(run), losses, *after])
        if stop_at is not None:
            trainer.callbacks.append(StopAt(stop_at, 0, request))
        with Checkpoints(run.checkpoints.folder, keep_last=run.checkpoints.keep_last) as checkpoints:
            trainer.train(checkpoints, request)
    request.close()
    return losses.by_step, printed.getvalue()
