"""Console output of a run: a live table on a terminal, one line per logged step elsewhere."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections import deque
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.columns import Column, columns_of, columns_that_fit, duration, log_line
from fourfold.train.observe.meter import is_logged
from fourfold.train.observe.metrics import step_metrics
from fourfold.train.observe.run_metadata import describe_run

_ROWS = 10  # of earlier steps, evenly spaced; the newest step comes below them
_RECENT = 50  # logged steps that the time left is estimated from
_SHARE = 0.005  # of the run's time that drawing may take


class ConsoleLogger(Callback):
    """Writes to the standard output of rank 0."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._pace: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._start_s = 0.0
        self._first_step = 0
        self._last: dict[str, float] = {}
        self._screen: _Screen | None = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
        self._start_s, self._first_step = time.perf_counter(), trainer.step
        self._pace.append((self._start_s, trainer.step))
        self._print(describe_run(trainer))
        for note in trainer.report.notes:  # such as an option without effect, or an unused weight
            self._print(f"  {note}")
        if trainer.step:
            self._print(
                f"resumed from step {trainer.step} of {trainer.run.schedule.steps}{_previous_grid(trainer)}"
            )
        if self._console.is_terminal:
            self._screen = _Screen(self._console, trainer)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if not trainer.is_first or not is_logged(trainer, result.step):
            return
        metrics = step_metrics(result)
        self._last |= metrics
        self._pace.append((time.perf_counter(), result.step))
        left_s = self._left_s(trainer)
        if self._screen is not None:
            self._screen.add(metrics, left_s)
        else:
            self._print(log_line(metrics, trainer.run.schedule.steps, left_s))

    def _left_s(self, trainer: Trainer) -> float:
        (before_s, before), (now_s, now) = self._pace[0], self._pace[-1]
        return (trainer.run.schedule.steps - now) * (now_s - before_s) / max(1, now - before)

    def on_end(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
        if self._screen is not None:
            self._screen.close()
        words = [
            f"{trainer.step - self._first_step} steps in {duration(time.perf_counter() - self._start_s)}"
        ]
        for name, word in (("loss", "loss"), ("validation_loss", "validation loss")):
            if name in self._last:
                words.append(f"{word} {self._last[name]:.4f}")
        self._print(f"{'done' if trainer.is_done else f'stopped at step {trainer.step}'}: {', '.join(words)}")

    def _print(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False)
        else:
            # Not through rich: it would wrap lines in a file, and take as long as everything else together.
            print(text, file=self._console.file, flush=True)


class _Screen:
    """The table and the progress bar, drawn in place."""

    def __init__(self, console: Console, trainer: Trainer) -> None:
        self._console, self._steps = console, trainer.run.schedule.steps
        self._columns = columns_of(trainer)
        self._every = _round_up((self._steps - trainer.step) / _ROWS)
        self._rows: deque[dict[str, float]] = deque(maxlen=_ROWS)
        self._now: dict[str, float] = {"step": trainer.step}
        self._validation: dict[str, float] = {}
        self._left_s: float | None = None
        self._drawn_s = self._pause_s = 0.0
        # Drawn when there is something new, not by a thread that would slow down the steps.
        self._live = Live(console=console, auto_refresh=False)
        atexit.register(self._live.stop)  # restores the cursor if the run fails
        self._live.start()
        self._draw()

    def add(self, metrics: dict[str, float], left_s: float) -> None:
        # A row shows the newest evaluation up to it.
        self._validation |= {name: v for name, v in metrics.items() if name == "validation_loss"}
        before = self._now["step"]
        self._now, self._left_s = metrics, left_s
        if metrics["step"] // self._every > before // self._every:
            self._rows.append(self._validation | metrics)
        if time.perf_counter() - self._drawn_s > self._pause_s or metrics["step"] == self._steps:
            self._draw()

    def close(self) -> None:
        self._draw()
        self._live.stop()
        atexit.unregister(self._live.stop)

    def _draw(self) -> None:
        start_s = time.perf_counter()
        self._live.update(Group("", self._bar(), "", self._table()), refresh=True)
        self._drawn_s = time.perf_counter()
        self._pause_s = max(0.2, (self._drawn_s - start_s) / _SHARE)

    def _table(self) -> RenderableType:
        columns = columns_that_fit(self._columns, self._console.width)
        table = Table.grid(padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(justify="right", no_wrap=True, min_width=column.width)
        table.add_row(*(Text(column.heading, style="dim") for column in columns))
        for row in self._rows:
            if row["step"] != self._now["step"]:
                table.add_row(*(_cell(column, row, "dim") for column in columns))
        table.add_row(*(_cell(column, self._validation | self._now, "bold") for column in columns))
        return table

    def _bar(self) -> RenderableType:
        done = int(self._now["step"])
        left = "" if self._left_s is None else f"{duration(self._left_s)} left" if done < self._steps else ""
        words = f"  {done:,} of {self._steps:,}   {done / self._steps:.0%}   {left}"
        bar: Any = ProgressBar(
            self._steps,
            done,
            width=max(10, min(60, self._console.width - len(words) - 2)),
            style="grey23",
            complete_style="cyan",
            finished_style="cyan",
        )
        line = Table.grid()
        line.add_row(bar, Text(words))
        return line


def _cell(column: Column, row: dict[str, float], style: str) -> Text:
    return Text(column.text(row), style=style)


def _round_up(steps: float) -> int:
    """The next round number of steps.

    Example:
        >>> [_round_up(n) for n in (0.3, 3, 70, 101)]
        [1, 5, 100, 200]
    """
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size >= steps:
                return factor * size
        size *= 10


def _previous_grid(trainer: Trainer) -> str:
    """Describe the grid of the checkpoint if it was another one."""
    before, grid = trainer.training.saved_on, trainer.grid
    if before is None or before == grid.shape:
        return ""
    was = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, before, strict=True))
    return (
        f", which was saved on {math.prod(before)} ranks ({was}); this run has {math.prod(grid.shape)} {grid}"
    )
