"""What a person sees while a run goes on: one line a step, alive on a terminal and plain elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fourfold.planner.show import seconds
from fourfold.train.metrics import figures_of, peak_memory_bytes
from fourfold.train.trainer import Callback, StepResult, Trainer

_RECENT = 20  # steps whose mean tells how fast it goes


class Lines(Callback):
    """Step, loss, norm, rate, tokens a second, time left; on rank 0 alone."""

    def __init__(self, every_steps: int = 1, console: Console | None = None) -> None:
        self._every, self._console = every_steps, console or Console(file=sys.stderr)
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._bar: Progress | None = None
        self._task: int = 0
        self._start_s = 0.0

    def on_start(self, trainer: Trainer) -> None:
        self._start_s = time.perf_counter()
        if not trainer.is_first:
            return
        steps = trainer.run.schedule.steps
        if trainer.step:
            self._console.print(f"goes on from step {trainer.step} of {steps}")
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("steps", total=steps, completed=trainer.step)
            self._bar.start()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if not trainer.is_first:
            return
        self._recent_s.append(result.seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=result.step)  # type: ignore[arg-type]
        if result.step % self._every == 0:
            (self._bar.console if self._bar else self._console).print(
                self._line(trainer, result), highlight=False
            )

    def _line(self, trainer: Trainer, result: StepResult) -> str:
        figures = figures_of(result)
        mean_s = sum(self._recent_s) / len(self._recent_s)
        words = [f"step {result.step}", f"loss {figures['loss']:.4f}", f"lr {result.learning_rate:.2e}"]
        if "gradient_norm" in figures:
            words.append(f"norm {figures['gradient_norm']:.3f}")
        words += [f"{result.tokens / mean_s:,.0f} tokens/s", f"{seconds(mean_s)} a step"]
        words += [f"{name} {value:.4g}" for name, value in result.figures.items()]
        memory = peak_memory_bytes(trainer.grid.device)
        if memory is not None:
            words.append(f"{memory / 2**30:.1f} GiB")
        if self._bar is None:
            left_s = (trainer.run.schedule.steps - result.step) * mean_s
            words.append(f"{left_s / 60:.1f} min left")
        return "  ".join(words)

    def on_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.stop()
        if trainer.is_first:
            self._console.print(
                f"done: {trainer.step} steps in {(time.perf_counter() - self._start_s) / 60:.1f} min"
            )
