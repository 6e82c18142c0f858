"""Console output of a run: a live table on a terminal, one line per logged step elsewhere."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.metrics import MetricsLogger
from fourfold.train.observe.run_metadata import describe_run

_ROWS = 10  # of earlier steps, evenly spaced; the newest step comes below them
_RECENT = 50  # logged steps that the time left is estimated from
_SHARE = 0.005  # of the run's time that drawing may take


class ConsoleLogger(MetricsLogger):
    """Writes to the standard output of rank 0."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._pace: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._start_s = 0.0
        self._first_step = 0
        self._last: dict[str, float] = {}
        self._screen: _Screen | None = None

    def open(self, trainer: Trainer) -> None:
        self._start_s, self._first_step = time.perf_counter(), trainer.step
        self._pace.append((self._start_s, trainer.step))
        self._print(describe_run(trainer))
        for note in trainer.report.notes:  # such as an option without effect, or an unused weight
            self._print(f"  {note}")
        if trainer.step:
            steps = trainer.run.schedule.steps
            self._print(f"resumed from step {trainer.step} of {steps}{_previous_grid(trainer)}")
        if trainer.is_done:
            self._print(
                "all steps are done: use a larger schedule.steps to train on, or another checkpoints.folder to train anew"
            )
        if self._console.is_terminal:
            self._screen = _Screen(self._console, trainer)

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self._last |= metrics
        self._pace.append((time.perf_counter(), step))
        (before_s, before), (now_s, now) = self._pace[0], self._pace[-1]
        steps = trainer.run.schedule.steps
        left_s = (steps - now) * (now_s - before_s) / max(1, now - before)
        if self._screen is not None:
            self._screen.add(metrics, left_s)
        else:
            self._print(log_line(metrics, steps, left_s))

    def close(self, trainer: Trainer) -> None:
        if self._screen is not None:
            self._screen.close()
        spent = duration(time.perf_counter() - self._start_s)
        words = [f"{trainer.step - self._first_step} steps in {spent}"]
        for name in ("loss", "validation_loss"):
            if name in self._last:
                words.append(f"{name.replace('_', ' ')} {self._last[name]:.4f}")
        self._print(f"{'done' if trainer.is_done else f'stopped at step {trainer.step}'}: {', '.join(words)}")

    def _print(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False)
        else:
            # Not through rich: it would wrap lines in a file, and take as long as everything else together.
            print(text, file=self._console.file, flush=True)


@dataclass(frozen=True)
class Column:
    """A metric in the table and in a line. On a narrow terminal the columns with the highest ``drop_order`` go first; 0: never."""

    heading: str
    name: str
    template: str
    drop_order: int = 0

    @property
    def width(self) -> int:
        return max(len(self.heading), len(self.template.format_map(defaultdict(float))))

    def text(self, metrics: dict[str, float]) -> str:
        return self.template.format_map(metrics) if self.name in metrics else ""


COLUMNS = (
    Column("loss", "loss", "{loss:7.4f}"),
    Column("aux", "aux_loss", "{aux_loss:7.4f}", drop_order=5),
    Column("load", "expert_load", "{expert_load:5.2f}", drop_order=5),
    Column("lr", "learning_rate", "{learning_rate:.3e}", drop_order=5),
    Column("norm", "gradient_norm", "{gradient_norm:8.4f}", drop_order=4),
    Column("tokens/s", "tokens_per_s", "{tokens_per_s:9,.0f}"),
    Column("seconds", "seconds", "{seconds:.4f}", drop_order=3),
    Column("mfu", "mfu", "{mfu:6.1%}"),
    Column("memory", "memory_bytes", "{memory_gib:6.2f} GiB", drop_order=6),
    *(
        Column(f"exposed {axis}", f"exposed_{axis}_s", f"{{exposed_{axis}_s:.4f}} s {{share_{axis}:6.1%}}", 2)
        for axis in reversed(AXES)
    ),
    Column("validation", "validation_loss", "{validation_loss:.4f}"),
)


def _with_derived(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with those that only people read."""
    shares = {
        f"share_{a}": metrics[n] / metrics["seconds"] for a in AXES if (n := f"exposed_{a}_s") in metrics
    }
    return metrics | shares | {"memory_gib": metrics.get("memory_bytes", 0.0) / 2**30}


def columns_that_fit(columns: Sequence[Column], width: int) -> list[Column]:
    """Drop columns until the rest fits."""
    kept = list(columns)
    while sum(column.width + 2 for column in kept) > width:
        first = max(kept, key=lambda column: column.drop_order)
        if first.drop_order == 0:
            break
        kept.remove(first)
    return kept


def log_line(metrics: dict[str, float], steps: int, left_s: float) -> str:
    """All metrics in one line, each after its name and in a fixed column.

    Example:
        >>> log_line({"step": 7, "loss": 2.5, "seconds": 0.5, "tokens_per_s": 128, "exposed_x_s": 0.05}, 100, 47)
        'step   7/100  loss  2.5000  tokens/s       128  seconds 0.5000  exposed x 0.0500 s  10.0%  left 47 s'
    """
    shown = _with_derived(metrics)
    words = [f"{column.heading} {column.text(shown)}" for column in COLUMNS if column.name in shown]
    words.insert(len(words) - ("validation_loss" in shown), f"left {duration(left_s)}")
    return "  ".join([f"step {shown['step']:{len(str(steps))}.0f}/{steps}", *words])


def duration(span_s: float) -> str:
    """
    Example:
        >>> [duration(s) for s in (4.2, 75, 3720, 200_000)]
        ['4 s', '1 min 15 s', '1 h 02 min', '2 d 7 h']
    """
    minutes, s = divmod(round(span_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {s:02} s" if minutes else f"{s} s"


class _Screen:
    """The table and the progress bar, drawn in place."""

    def __init__(self, console: Console, trainer: Trainer) -> None:
        self._console, self._steps = console, trainer.run.schedule.steps
        self._every = round(_round_up(max(1.0, (self._steps - trainer.step) / _ROWS)))
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
        newest = self._validation | self._now
        step = Column("step", "step", "{step:,.0f}")
        columns = columns_that_fit([step, *(c for c in COLUMNS if c.name in newest)], self._console.width)
        table = Table.grid(padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(justify="right", no_wrap=True, min_width=column.width)
        table.add_row(*(column.heading for column in columns), style="dim")
        for row in self._rows:
            if row["step"] != self._now["step"]:
                table.add_row(*(Text(column.text(_with_derived(row))) for column in columns), style="dim")
        table.add_row(*(Text(column.text(_with_derived(newest))) for column in columns), style="bold")
        return table

    def _bar(self) -> RenderableType:
        done = int(self._now["step"])
        left = "" if self._left_s is None or done == self._steps else f"{duration(self._left_s)} left"
        words = f"  {done:,} of {self._steps:,}   {done / self._steps:.0%}   {left}"
        width = max(10, min(60, self._console.width - len(words) - 2))
        bar: Any = ProgressBar(
            self._steps, done, width=width, style="grey23", complete_style="cyan", finished_style="cyan"
        )
        line = Table.grid()
        line.add_row(bar, Text(words))
        return line


def _previous_grid(trainer: Trainer) -> str:
    """Describe the grid of the checkpoint if it was another one."""
    before, grid = trainer.training.saved_on, trainer.grid
    if before is None or before == grid.shape:
        return ""
    was = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, before, strict=True))
    return (
        f", which was saved on {math.prod(before)} ranks ({was}); this run has {math.prod(grid.shape)} {grid}"
    )


def _round_up(value: float) -> float:
    """The next round number.

    Example:
        >>> [_round_up(v) for v in (1.0, 3.2, 18.0, 2100.0)]
        [1.0, 5.0, 20.0, 2500.0]
    """
    size = 10.0 ** math.floor(math.log10(value))
    return next(f * size for f in (1, 2, 2.5, 5, 10) if f * size >= value)
