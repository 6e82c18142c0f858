"""The timeouts of a run's collectives, and the report after one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.resilience.hang.monitor import Monitor
from fourfold.train.resilience.hang.status import CollectiveTracker

# The backend times out this much later than the monitor, which reports first.
BACKEND_LATER_S = 0.4


class LostRanks(RuntimeError):
    """A collective did not finish: a rank is dead, stopped or behind. The message names it."""


class HangDetector(Callback):
    """``first_step_timeout_s`` bounds the first step, in which much is built; ``timeout_s`` those after it.

    With ``ends_process`` a rank exits after its report, even if its main thread waits for something else.
    """

    def __init__(
        self, timeout_s: float, first_step_timeout_s: float, folder: Path, *, ends_process: bool = True
    ) -> None:
        self._ends_process = ends_process
        self._timeout_s, self._first_s, self._folder = timeout_s, max(timeout_s, first_step_timeout_s), folder
        self._monitor: Monitor | None = None

    @contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        if dist.get_world_size() == 1:  # no rank to wait for
            yield
            return
        grid = trainer.grid
        tracker = CollectiveTracker(
            dist.get_rank(),
            lambda: (trainer.step + 1, trainer.activity),
            host_waits=grid.device.type != "cuda",
        )
        monitor = Monitor(
            tracker, grid.shape, self._folder, threading.get_ident(), ends_process=self._ends_process
        )
        self._monitor = monitor
        self._set_timeout(trainer, self._first_s)
        grid.collectives.observers.append(tracker)
        monitor.start()
        try:
            yield
        except Exception as error:
            summary = monitor.report(f"{type(error).__name__}: {error}")
            if is_from_collective(error):
                raise LostRanks(summary) from error
            raise
        finally:
            monitor.stop()
            grid.collectives.observers.remove(tracker)
            self._monitor = None

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._monitor is not None and self._monitor.timeout_s != self._timeout_s:
            self._set_timeout(trainer, self._timeout_s)

    def _set_timeout(self, trainer: Trainer, seconds: float) -> None:
        assert self._monitor is not None
        self._monitor.timeout_s = seconds
        trainer.grid.set_timeout(seconds + BACKEND_LATER_S)


def is_from_collective(error: BaseException) -> bool:
    """Does the error come from the backend? Gloo raises plain RuntimeErrors that name its files (seen in torch 2.13.0)."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )
