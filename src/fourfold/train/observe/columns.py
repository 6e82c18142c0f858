"""Metrics of a step as text: cells of a table, a line of a log, a duration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.mesh.axes import AXES, Axis
from fourfold.planner.show.tables import seconds
from fourfold.train.loop.trainer import Trainer


@dataclass(frozen=True)
class Column:
    """A metric in the table. On a narrow terminal the columns with the highest ``drop_order`` are dropped first; 0: never."""

    heading: str
    name: str
    width: int
    format: Callable[[dict[str, float]], str]
    drop_order: int = 0

    def text(self, metrics: dict[str, float]) -> str:
        return self.format(metrics) if self.name in metrics else ""


def columns_of(trainer: Trainer) -> list[Column]:
    """The columns for this run."""
    columns = [
        Column("step", "step", len(f"{trainer.run.schedule.steps:,}") + 2, lambda f: f"{f['step']:,.0f}"),
        Column("loss", "loss", 7, lambda f: f"{f['loss']:.4f}"),
        Column("validation", "validation_loss", 10, lambda f: f"{f['validation_loss']:.4f}"),
        Column("tokens/s", "tokens_per_s", 9, lambda f: f"{f['tokens_per_s']:,.0f}"),
        Column("a step", "seconds", 8, lambda f: seconds(f["seconds"]), drop_order=3),
        Column("MFU", "mfu", 6, lambda f: f"{f['mfu']:.1%}"),
        Column("rate", "learning_rate", 8, lambda f: f"{f['learning_rate']:.2e}", drop_order=5),
        Column("norm", "gradient_norm", 7, lambda f: f"{f['gradient_norm']:.3f}", drop_order=4),
        Column("memory", "memory_bytes", 9, lambda f: f"{f['memory_bytes'] / 2**30:.2f} GiB", drop_order=6),
    ]
    if trainer.grid.device.type != "cuda":
        columns = [column for column in columns if column.name != "mfu"]
    for axis in reversed(AXES):
        if trainer.grid.size(axis) > 1:
            columns.append(Column(f"exposed {axis}", f"exposed_{axis}_s", 14, _exposed(axis), drop_order=2))
    return columns


def _exposed(axis: Axis) -> Callable[[dict[str, float]], str]:
    name = f"exposed_{axis}_s"
    return lambda f: f"{seconds(f[name])} {f[name] / f['seconds']:4.0%}"


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
    f = metrics
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
