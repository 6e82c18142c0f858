"""Figures of each step, kept: one line of JSON each, and TensorBoard's files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

import torch

from fourfold.train.trainer import Callback, StepResult, Trainer


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


class JsonLines(Callback):
    """``metrics.jsonl``: what every tool can read. A resumed run goes on behind the step that it resumes from."""

    def __init__(self, folder: Path, every_steps: int = 1) -> None:
        self._path, self._every = folder / "metrics.jsonl", every_steps
        self._file: IO[str] | None = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Steps that were done, but not saved, are done again.
        kept = [line for line in self._lines() if json.loads(line)["step"] <= trainer.step]
        self._path.write_text("".join(f"{line}\n" for line in kept))
        self._file = self._path.open("a")

    def _lines(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._file is not None and result.step % self._every == 0:
            figures = {k: v if math.isfinite(v) else str(v) for k, v in figures_of(result).items()}
            self._file.write(json.dumps(figures) + "\n")
            self._file.flush()

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard(Callback):
    """TensorBoard's files, with PyTorch's own writer."""

    def __init__(self, folder: Path, every_steps: int = 1) -> None:
        self._folder, self._every = folder, every_steps
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.is_first:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=trainer.step + 1)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._writer is not None and result.step % self._every == 0:
            for name, value in figures_of(result).items():
                if name != "step":
                    self._writer.add_scalar(name, value, result.step)

    def on_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most that tensors took on this device so far; None where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
