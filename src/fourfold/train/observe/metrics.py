"""Figures of steps, kept: one line of JSON each, and TensorBoard's files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged

METRICS = "metrics.jsonl"


def figures_of(result: StepResult) -> dict[str, float]:
    """All figures of a step; reading the loss waits for the device."""
    figures = {
        "step": result.step,
        "loss": float(result.loss),
        "learning_rate": result.learning_rate,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens / result.seconds,
    }
    if result.gradient_norm is not None:
        figures["gradient_norm"] = float(result.gradient_norm)
    return figures | result.figures


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """What a run wrote, step by step. A line that a kill cut short is left out; `nan` and `inf` are numbers again."""
    path = folder / METRICS
    if not path.exists():
        raise ValueError(f"there is no {path}; give the folder that [logging] folder of the run's file names")
    return [figures for line in path.read_bytes().splitlines() if (figures := _parsed(line)) is not None]


class JsonLines(Callback):
    """``metrics.jsonl``: what every tool can read. A resumed run goes on behind the step that it resumes from.

    Lines that a new run, from step 0, finds there are of another: they are set aside as ``metrics.1.jsonl`` and so on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / METRICS
        if path.exists() and path.stat().st_size:
            if trainer.step == 0:
                path.rename(_free_name(self._folder))
            else:
                self._drop_undone(trainer)
        self._file = path.open("ab", buffering=0)  # a line is one write, and there at once

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._file is not None and is_logged(trainer, result.step):
            self._file.write(_line(figures_of(result)))

    def on_rollback(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._drop_undone(trainer)
            self._file = (self._folder / METRICS).open("ab", buffering=0)

    def _drop_undone(self, trainer: Trainer) -> None:
        """Steps that were done, but not saved, are done again."""
        path = self._folder / METRICS
        lines = path.read_bytes().splitlines()
        kept = [line for line in lines if (seen := _parsed(line)) and seen["step"] <= trainer.step]
        replace_file(path, b"".join(line + b"\n" for line in kept))

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard(Callback):
    """TensorBoard's files, with PyTorch's own writer."""

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

            # One event for all figures: `add_scalar` would write one for each, at ten times the time.
            values = [Summary.Value(tag=n, simple_value=v) for n, v in shown(figures_of(result)).items()]
            self._writer.file_writer.add_summary(Summary(value=values), result.step)

    def on_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def shown(figures: dict[str, float]) -> dict[str, float]:
    """What makes a curve over the steps, in groups.

    Example:
        >>> shown({"step": 3, "loss": 2.5, "exposed_x_s": 0.1})
        {'train/loss': 2.5, 'time/exposed_x_s': 0.1}
    """
    return {f"{_group(name)}/{name}": value for name, value in figures.items() if name not in _NO_CURVES}


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


def replace_file(path: Path, content: bytes) -> None:
    """All of it or nothing: a kill in the middle leaves what was there."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _line(figures: dict[str, float]) -> bytes:
    # JSON knows no nan and no inf.
    values = {name: value if math.isfinite(value) else str(value) for name, value in figures.items()}
    return json.dumps(values).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, float] | None:
    try:
        values = json.loads(line)
        return {name: float(value) for name, value in values.items()} if "step" in values else None
    except (ValueError, TypeError, AttributeError):
        return None


def _free_name(folder: Path) -> Path:
    names: Iterable[Path] = (folder / f"metrics.{number}.jsonl" for number in range(1, 1_000_000))
    return next(name for name in names if not name.exists())
