"""Traces of chosen steps, for ui.perfetto.dev: operators, and every collective by axis and module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fourfold.profiling.timeline import timeline
from fourfold.train.loop.trainer import Callback, Trainer

_RANKS = 16  # that write: those of a node or two, which represent the others


class Profile(Callback):
    """Writes ``step-000010-rank-0.json`` and so on, for the steps from ``first`` to ``last``. Profiled steps take longer."""

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._first, self._last = folder, first, last

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step >= self._last and trainer.is_first:
            print(
                f"profile_steps={self._first}:{self._last} writes nothing: step {trainer.step} is done already"
            )

    def around_step(self, trainer: Trainer) -> AbstractContextManager[Any]:
        step = trainer.step + 1
        if not self._first <= step <= self._last or dist.get_rank() >= _RANKS:
            return nullcontext()
        self._folder.mkdir(parents=True, exist_ok=True)
        return timeline(self._folder / f"step-{step:06d}-rank-{{rank}}.json", trainer.grid)
