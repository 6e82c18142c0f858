"""Garbage collection at the same steps on all ranks: one that stops for it at any other moment holds up all others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from fourfold.train.loop.trainer import Callback, StepResult, Trainer

EVERY_STEPS = 50  # a collection of young objects takes milliseconds


class GarbageCollection(Callback):
    """Python collects cycles only after every `EVERY_STEPS` steps. What exists before the first step is never searched."""

    @contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % EVERY_STEPS == 0:
            gc.collect(1)
