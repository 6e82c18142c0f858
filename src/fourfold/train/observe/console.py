"""Console output of a run: one line per logged step, with each metric in a fixed column."""

from __future__ import annotations

import math
import time
from collections import deque

from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.metrics import MetricsLogger
from fourfold.train.observe.run_metadata import describe_run

_RECENT = 50  # logged steps that the time left is estimated from


class ConsoleLogger(MetricsLogger):
    """Writes to the standard output of rank 0."""

    def __init__(self) -> None:
        self._pace: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._start_s = 0.0
        self._first_step = 0
        self._last: dict[str, float] = {}

    def open(self, trainer: Trainer) -> None:
        self._start_s, self._first_step = time.perf_counter(), trainer.step
        self._pace.append((self._start_s, trainer.step))
        print(describe_run(trainer), flush=True)
        for note in trainer.report.notes:  # such as an option without effect, or an unused weight
            print(f"  {note}", flush=True)
        if trainer.step:
            steps = trainer.run.schedule.steps
            print(f"resumed from step {trainer.step} of {steps}{_previous_grid(trainer)}", flush=True)

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self._last |= metrics
        self._pace.append((time.perf_counter(), step))
        (before_s, before), (now_s, now) = self._pace[0], self._pace[-1]
        steps = trainer.run.schedule.steps
        left_s = (steps - now) * (now_s - before_s) / max(1, now - before)
        print(log_line(metrics, steps, left_s), flush=True)

    def close(self, trainer: Trainer) -> None:
        spent = duration(time.perf_counter() - self._start_s)
        words = [f"{trainer.step - self._first_step} steps in {spent}"]
        for name in ("loss", "validation_loss"):
            if name in self._last:
                words.append(f"{name.replace('_', ' ')} {self._last[name]:.4f}")
        how = "done" if trainer.is_done else f"stopped at step {trainer.step}"
        print(f"{how}: {', '.join(words)}", flush=True)


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
