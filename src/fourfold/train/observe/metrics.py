"""Metrics of steps in files: one line of JSON each, and TensorBoard's event files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
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
    return metrics | result.metrics


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run, step by step, without lines that a kill has truncated; `nan` and `inf` are floats again."""
    path = folder / METRICS
    if not path.exists():
        raise ValueError(f"there is no {path}; give the [logging] folder of the run config")
    return [metrics for line in path.read_bytes().splitlines() if (metrics := _parse(line)) is not None]


class JsonLines(Callback):
    """``metrics.jsonl``. A resumed run continues after the step that it resumes from.

    A new run, from step 0, renames the file of another run to ``metrics.1.jsonl`` and so on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
        path = self._folder / METRICS
        if path.exists() and path.stat().st_size:
            if trainer.step == 0:
                path.rename(_free_name(self._folder))
            else:
                self._drop_undone(trainer)
        self._file = files.open_append(path)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._file is not None and is_logged(trainer, result.step):
            self._file.write(_line(step_metrics(result)))

    def on_rollback(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._drop_undone(trainer)
            self._file = files.open_append(self._folder / METRICS)

    def _drop_undone(self, trainer: Trainer) -> None:
        """Drop the lines of steps that were not saved: they are repeated."""
        path = self._folder / METRICS
        lines = path.read_bytes().splitlines()
        kept = [line for line in lines if (metrics := _parse(line)) and metrics["step"] <= trainer.step]
        files.write_atomically(path, b"".join(line + b"\n" for line in kept))

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard(Callback):
    """TensorBoard's event files, by PyTorch's own writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.is_first:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=trainer.step + 1)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._writer is not None and is_logged(trainer, result.step):
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for all metrics: `add_scalar` would write one for each, and take ten times as long.
            values = [
                Summary.Value(tag=n, simple_value=v) for n, v in with_groups(step_metrics(result)).items()
            ]
            self._writer.file_writer.add_summary(Summary(value=values), result.step)

    def on_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def with_groups(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that make a curve, with their group before the name.

    Example:
        >>> with_groups({"step": 3, "loss": 2.5, "exposed_x_s": 0.1})
        {'train/loss': 2.5, 'time/exposed_x_s': 0.1}
    """
    return {f"{_group(name)}/{name}": value for name, value in metrics.items() if name not in _NO_CURVES}


_NO_CURVES = ("step", "steps", "time")
_GROUPS = {
    "train": ("loss", "gradient_norm", "learning_rate", "tokens"),
    "validation": ("validation_loss",),
    "speed": ("seconds", "tokens_per_s", "mfu"),
    "memory": ("memory_bytes",),
}


def _group(name: str) -> str:
    found = next((group for group, names in _GROUPS.items() if name in names), None)
    return found or ("time" if name.endswith("_s") else "other")


def _line(metrics: dict[str, float]) -> bytes:
    # JSON has neither nan nor inf.
    values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    return json.dumps(values).encode() + b"\n"


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        values = json.loads(line)
        return {name: float(value) for name, value in values.items()} if "step" in values else None
    except (ValueError, TypeError, AttributeError):
        return None


def _free_name(folder: Path) -> Path:
    names: Iterable[Path] = (folder / f"metrics.{number}.jsonl" for number in range(1, 1_000_000))
    return next(name for name in names if not name.exists())
