"""Figures of a step as text: cells of a table, a line of a log, a span of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.mesh.axes import AXES, Axis
from fourfold.planner.show.tables import seconds
from fourfold.train.loop.trainer import Trainer


@dataclass(frozen=True)
class Figure:
    """A column: what it tells of a step, and how dear it is where there is little room (0: it stays)."""

    heading: str
    name: str
    width: int
    say: Callable[[dict[str, float]], str]
    goes: int = 0

    def text(self, figures: dict[str, float]) -> str:
        return self.say(figures) if self.name in figures else ""


def columns_of(trainer: Trainer) -> list[Figure]:
    """What there is to tell of this run."""
    columns = [
        Figure("step", "step", len(f"{trainer.run.schedule.steps:,}") + 2, lambda f: f"{f['step']:,.0f}"),
        Figure("loss", "loss", 7, lambda f: f"{f['loss']:.4f}"),
        Figure("validation", "validation_loss", 10, lambda f: f"{f['validation_loss']:.4f}"),
        Figure("tokens/s", "tokens_per_s", 9, lambda f: f"{f['tokens_per_s']:,.0f}"),
        Figure("a step", "seconds", 8, lambda f: seconds(f["seconds"]), goes=3),
        Figure("MFU", "mfu", 6, lambda f: f"{f['mfu']:.1%}"),
        Figure("rate", "learning_rate", 8, lambda f: f"{f['learning_rate']:.2e}", goes=5),
        Figure("norm", "gradient_norm", 7, lambda f: f"{f['gradient_norm']:.3f}", goes=4),
        Figure("memory", "memory_bytes", 9, lambda f: f"{f['memory_bytes'] / 2**30:.2f} GiB", goes=6),
    ]
    known = trainer.grid.device.type == "cuda"
    columns = [column for column in columns if column.name != "mfu" or known]
    for axis in reversed(AXES):
        if trainer.grid.size(axis) > 1:
            columns.append(Figure(f"waits {axis}", f"exposed_{axis}_s", 14, _waits(axis), goes=2))
    return columns


def _waits(axis: Axis) -> Callable[[dict[str, float]], str]:
    name = f"exposed_{axis}_s"
    return lambda f: f"{seconds(f[name])} {f[name] / f['seconds']:4.0%}"


def that_fit(columns: Sequence[Figure], width: int) -> list[Figure]:
    """Without the ones that can go, the least dear first, until the rest fits."""
    left = list(columns)
    while sum(column.width + 2 for column in left) > width:
        least = max(left, key=lambda column: column.goes)
        if least.goes == 0:
            break
        left.remove(least)
    return left


def line_of(figures: dict[str, float], steps: int, left_s: float) -> str:
    """All of it in one line: a word, then its figure, each in its place.

    Example:
        >>> line_of({"step": 7, "loss": 2.5, "seconds": 0.5, "tokens_per_s": 128, "exposed_x_s": 0.05}, 100, 47)
        'step   7/100  loss  2.5000  tokens/s       128  seconds 0.5000  exposed x 0.0500 s  10.0%  left 47 s'
    """
    f = figures
    words = [f"step {f['step']:{len(str(steps))}.0f}/{steps}", f"loss {f['loss']:7.4f}"]
    if "learning_rate" in f:
        words.append(f"lr {f['learning_rate']:.3e}")
    if "gradient_norm" in f:
        words.append(f"norm {f['gradient_norm']:8.4f}")
    words += [f"tokens/s {f['tokens_per_s']:9,.0f}", f"seconds {f['seconds']:.4f}"]
    if "mfu" in f:
        words.append(f"mfu {f['mfu']:6.1%}")
    if "memory_bytes" in f:
        words.append(f"memory {f['memory_bytes'] / 2**30:6.2f} GiB")
    for axis in reversed(AXES):
        if (name := f"exposed_{axis}_s") in f:
            words.append(f"exposed {axis} {f[name]:.4f} s {f[name] / f['seconds']:6.1%}")
    words.append(f"left {clock(left_s)}")
    if "validation_loss" in f:
        words.append(f"validation {f['validation_loss']:.4f}")
    return "  ".join(words)


def clock(span_s: float) -> str:
    """
    Example:
        >>> [clock(s) for s in (4.2, 75, 3720, 200_000)]
        ['4 s', '1 min 15 s', '1 h 02 min', '2 d 7 h']
    """
    whole = round(span_s)
    minutes, s = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {s:02} s" if minutes else f"{s} s"
