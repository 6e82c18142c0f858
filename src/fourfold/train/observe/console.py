"""Console output of a run: one line per logged step, on a terminal with a progress bar below."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn

from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.metrics import MetricsLogger
from fourfold.train.observe.run_metadata import describe_run

_RECENT = 50  # logged steps that the time left is estimated from
_SHARE = 0.005  # of the run's time that drawing on a terminal may take


class ConsoleLogger(MetricsLogger):
    """Writes to the standard output of rank 0."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._pace: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._start_s = 0.0
        self._first_step = 0
        self._last: dict[str, float] = {}
        # Drawn with the lines, not by a thread that would slow down the steps.
        columns = BarColumn(), MofNCompleteColumn(), TaskProgressColumn()
        self._bar = Progress(*columns, console=self._console, auto_refresh=False)
        self._drawn_s = self._pause_s = 0.0

    def open(self, trainer: Trainer) -> None:
        self._start_s, self._first_step = time.perf_counter(), trainer.step
        self._pace.append((self._start_s, trainer.step))
        self._print(describe_run(trainer))
        for note in trainer.report.notes:  # such as an option without effect, or an unused weight
            self._print(f"  {note}")
        if trainer.step:
            steps = trainer.run.schedule.steps
            self._print(f"resumed from step {trainer.step} of {steps}{_previous_grid(trainer)}")
        if self._console.is_terminal:
            self._bar.add_task("", total=trainer.run.schedule.steps, completed=trainer.step)
            atexit.register(self._bar.stop)  # restores the cursor if the run fails
            self._bar.start()

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self._last |= metrics
        self._pace.append((time.perf_counter(), step))
        (before_s, before), (now_s, now) = self._pace[0], self._pace[-1]
        steps = trainer.run.schedule.steps
        line = log_line(metrics, steps, (steps - now) * (now_s - before_s) / max(1, now - before))
        if not self._console.is_terminal:
            self._print(line)
        elif now_s - self._drawn_s > self._pause_s or step == steps:
            self._bar.update(self._bar.task_ids[0], completed=step)
            self._print(line)
            self._drawn_s = time.perf_counter()
            self._pause_s = max(0.2, (self._drawn_s - now_s) / _SHARE)

    def close(self, trainer: Trainer) -> None:
        if self._console.is_terminal:
            self._bar.update(self._bar.task_ids[0], completed=trainer.step)
            self._bar.stop()
            atexit.unregister(self._bar.stop)
        spent = duration(time.perf_counter() - self._start_s)
        words = [f"{trainer.step - self._first_step} steps in {spent}"]
        for name in ("loss", "validation_loss"):
            if name in self._last:
                words.append(f"{name.replace('_', ' ')} {self._last[name]:.4f}")
        self._print(f"{'done' if trainer.is_done else f'stopped at step {trainer.step}'}: {', '.join(words)}")

    def _print(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            # Not through rich: it would wrap lines in a file, and take as long as everything else together.
            print(text, file=self._console.file, flush=True)


_LOGGED = {
    "loss": "loss {:7.4f}",
    "learning_rate": "lr {:.3e}",
    "gradient_norm": "norm {:8.4f}",
    "tokens_per_s": "tokens/s {:9,.0f}",
    "seconds": "seconds {:.4f}",
    "mfu": "mfu {:6.1%}",
    "memory_gib": "memory {:6.2f} GiB",
}


def log_line(metrics: dict[str, float], steps: int, left_s: float) -> str:
    """All metrics in one line, each after its name and in a fixed column.

    Example:
        >>> log_line({"step": 7, "loss": 2.5, "seconds": 0.5, "tokens_per_s": 128, "exposed_x_s": 0.05}, 100, 47)
        'step   7/100  loss  2.5000  tokens/s       128  seconds 0.5000  exposed x 0.0500 s  10.0%  left 47 s'
    """
    f = metrics
    if "memory_bytes" in f:
        f = f | {"memory_gib": f["memory_bytes"] / 2**30}
    words = [f"step {f['step']:{len(str(steps))}.0f}/{steps}"]
    words += [template.format(f[name]) for name, template in _LOGGED.items() if name in f]
    for axis in reversed(AXES):
        if (name := f"exposed_{axis}_s") in f:
            words.append(f"exposed {axis} {f[name]:.4f} s {f[name] / f['seconds']:6.1%}")
    words.append(f"left {duration(left_s)}")
    if "validation_loss" in f:
        words.append(f"validation {f['validation_loss']:.4f}")
    return "  ".join(words)


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


def _previous_grid(trainer: Trainer) -> str:
    """Describe the grid of the checkpoint if it was another one."""
    before, grid = trainer.training.saved_on, trainer.grid
    if before is None or before == grid.shape:
        return ""
    was = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, before, strict=True))
    return (
        f", which was saved on {math.prod(before)} ranks ({was}); this run has {math.prod(grid.shape)} {grid}"
    )
