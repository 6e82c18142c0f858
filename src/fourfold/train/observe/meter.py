"""What a step took, and where: tokens a second, memory, MFU, waiting by axis, for data, for evaluation and checkpoints.

One reading serves every callback behind it: they find the figures in `StepResult.figures`. What a step took is the mean of
the steps since the last reading. On CUDA a reading waits for the device, so there is one at the steps that are logged, and
no other. No GPU has run this.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from fourfold.mesh.axes import AXES, Axis
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.mfu import flops_per_token, peak_flops


def is_logged(trainer: Trainer, step: int) -> bool:
    """Does this step leave a line? Every so many do, those with an evaluation, and the last."""
    run = trainer.run
    evaluates = run.evaluation.every_steps
    is_evaluated = evaluates is not None and step % evaluates == 0
    return step % run.logging.every_steps == 0 or is_evaluated or step == run.schedule.steps


class Meter(Callback):
    """On rank 0 alone. Put it behind the evaluation, and before all that show figures."""

    def __init__(self) -> None:
        self._results: list[StepResult] = []  # since the last reading, as what follows
        self._exposed_s: dict[Axis, float] = dict.fromkeys(AXES, 0.0)
        self._beside_s: dict[str, float] = {}  # of the trainer, at the last reading
        self._waited_s: dict[Axis, float] = {}  # of the account, at the last reading
        self._ideal_s_per_token: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.is_first:
            self._waited_s, self._beside_s = _waited(trainer), dict(trainer.beside_s)
            self._ideal_s_per_token = _ideal_seconds_per_token(trainer)

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        yield
        if trainer.is_first and is_logged(trainer, trainer.step + 1):
            # Now, not in `on_step`: what an evaluation waits for is not of a step.
            now_s = _waited(trainer)
            self._exposed_s = {axis: now_s[axis] - self._waited_s[axis] for axis in AXES}

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if not trainer.is_first:
            return
        self._results.append(result)
        if is_logged(trainer, result.step):
            result.figures |= self._figures(trainer)
            self._results.clear()
            self._waited_s, self._beside_s = _waited(trainer), dict(trainer.beside_s)

    def _figures(self, trainer: Trainer) -> dict[str, float]:
        steps, last = len(self._results), self._results[-1]
        step_s = sum(result.seconds for result in self._results) / steps
        beside_s = {what: s - self._beside_s.get(what, 0.0) for what, s in trainer.beside_s.items()}
        figures: dict[str, float] = {
            "seconds": step_s,
            "tokens_per_s": last.tokens / step_s,
            # Not from the step: a run may be resumed with another batch.
            "tokens": trainer.training.data["samples"] * trainer.run.data.sequence_length,
            "steps": steps,
            "ranks": trainer.grid.mesh.size(),  # hosts may have come or gone
            "time": time.time(),
            "memory_bytes": memory_bytes(trainer.grid.device),
            "data_wait_s": beside_s.pop("data", 0.0) / steps,
        }
        for axis in AXES:
            if trainer.grid.size(axis) > 1:
                figures[f"exposed_{axis}_s"] = self._exposed_s[axis] / steps
        if self._ideal_s_per_token is not None:
            # Of the devices of all replicas that are there.
            figures["mfu"] = self._ideal_s_per_token * last.tokens / step_s / last.figures.get("replicas", 1)
        # An evaluation or a checkpoint is no part of each step: these are of all since the last reading.
        return figures | {f"{what}_s": s for what, s in beside_s.items() if s > 0}


def _waited(trainer: Trainer) -> dict[Axis, float]:
    seconds = dict.fromkeys(AXES, 0.0)
    for entry in trainer.grid.collectives.account():
        seconds[entry.axis] += entry.exposed_s
    return seconds


def _ideal_seconds_per_token(trainer: Trainer) -> float | None:
    """Seconds of all ranks at their peak that a token takes at least; None where a number of it is not known."""
    peak = peak_flops(trainer.grid.device, trainer.run.engine.precision)
    flops = flops_per_token(trainer.model, trainer.run.data.sequence_length)
    if peak is None or flops is None:
        return None
    return flops / (peak * trainer.grid.mesh.size())


def memory_bytes(device: torch.device) -> int:
    """CUDA: the most that tensors took so far. CPU: what is resident now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
