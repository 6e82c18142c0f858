"""Metrics of steps in files: one line of JSON each, and TensorBoard's event files."""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from typing import IO, Any

from fourfold import files
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged

METRICS = "metrics.jsonl"


def step_metrics(result: StepResult) -> dict[str, float]:
    """All metrics of a step; reading the loss waits for the device."""
    metrics = {
        "step": result.step,
        "loss": float(result.loss),
        "learning_rate": result.learning_rate,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens / result.seconds,
    }
    if result.gradient_norm is not None:
        metrics["gradient_norm"] = float(result.gradient_norm)
    if result.aux_loss is not None:
        metrics["aux_loss"] = float(result.aux_loss)
    return metrics | result.metrics


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run, step by step, without lines that a kill has truncated; `nan` and `inf` are floats again."""
    path = folder / METRICS
    if not path.exists():
        raise ValueError(f"there is no {path}; give the [logging] folder of the run config")
    return [metrics for line in path.read_bytes().splitlines() if (metrics := _parse(line)) is not None]


class MetricsLogger(Callback):
    """Logs the metrics of logged steps, on rank 0: override `open`, `write` and `close`."""

    is_open = False

    def open(self, trainer: Trainer) -> None: ...

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None: ...

    def close(self, trainer: Trainer) -> None: ...

    def on_start(self, trainer: Trainer) -> None:
        if trainer.is_first:
            self.open(trainer)
            self.is_open = True

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self.is_open and is_logged(trainer, result.step):
            self.write(trainer, result.step, step_metrics(result))

    def on_end(self, trainer: Trainer) -> None:
        if self.is_open:
            self.is_open = False
            self.close(trainer)


class JsonLines(MetricsLogger):
    """``metrics.jsonl``. A resumed run continues after the step that it resumes from.

    A new run, from step 0, renames the file of another run to ``metrics.1.jsonl`` and so on.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._file: IO[bytes]

    def open(self, trainer: Trainer) -> None:
        if trainer.step == 0 and self._path.exists() and self._path.stat().st_size:
            names = (self._path.with_name(f"metrics.{number}.jsonl") for number in count(1))
            self._path.rename(next(name for name in names if not name.exists()))
        self._open_after(trainer.step)

    def _open_after(self, step: int) -> None:
        """Drop the lines of steps after ``step``, which were not saved: they are repeated."""
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        if lines:
            kept = [line for line in lines if (metrics := _parse(line)) and metrics["step"] <= step]
            files.write_atomically(self._path, b"".join(line + b"\n" for line in kept))
        self._file = files.open_append(self._path)

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        # JSON has neither nan nor inf.
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self._file.write(json.dumps(values).encode() + b"\n")

    def on_rollback(self, trainer: Trainer) -> None:
        if self.is_open:
            self._file.close()
            self._open_after(trainer.step)

    def close(self, trainer: Trainer) -> None:
        self._file.close()


class TensorBoard(MetricsLogger):
    """TensorBoard's event files, by PyTorch's own writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=trainer.step + 1)

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all metrics: `add_scalar` would write one for each, and take ten times as long.
        values = [Summary.Value(tag=name, simple_value=v) for name, v in with_groups(metrics).items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)

    def close(self, trainer: Trainer) -> None:
        self._writer.close()


_NO_CURVES = ("step", "steps", "time")
_GROUPS = {
    "loss": "train",
    "aux_loss": "train",
    "gradient_norm": "train",
    "learning_rate": "train",
    "tokens": "train",
    "validation_loss": "validation",
    "seconds": "speed",
    "tokens_per_s": "speed",
    "mfu": "speed",
    "memory_bytes": "memory",
}


def with_groups(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that make a curve, with their group before the name.

    Example:
        >>> with_groups({"step": 3, "loss": 2.5, "exposed_x_s": 0.1})
        {'train/loss': 2.5, 'time/exposed_x_s': 0.1}
    """
    groups = {name: _GROUPS.get(name, _group(name)) for name in metrics}
    return {f"{groups[name]}/{name}": value for name, value in metrics.items() if name not in _NO_CURVES}


def _group(name: str) -> str:
    return "time" if name.endswith("_s") else "experts" if name.startswith("expert_") else "other"


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        values = json.loads(line)
        return {name: float(value) for name, value in values.items()} if "step" in values else None
    except (ValueError, TypeError, AttributeError):
        return None
