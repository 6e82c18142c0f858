"""Bad steps, with NaN, Inf or a spike in loss or gradient norm, leave the weights unchanged; several in a row roll back.

All ranks agree by an all-reduce of a flag. On CUDA the values stay on the device; the host reads them every `check_every_steps` steps.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged

WINDOW = 128  # good steps that a value is compared with
AT_LEAST = 20  # of them, before any value is a spike
# However steady a run is, less than this is not a spike: the logarithm of the ratio to the mean.
LEAST_SPIKE = {"loss": math.log(1.2), "norm": math.log(2.0)}
SMALLEST = 1e-30


class SpikeDetector:
    """The last good values of a metric, and whether another value is far above them."""

    def __init__(self, sigmas: float | None, least: float, device: torch.device) -> None:
        self._sigmas, self._least = sigmas, least
        self.values = torch.full((WINDOW,), torch.nan, dtype=torch.float32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._slots = torch.arange(WINDOW, device=device)

    def is_bad(self, value: Tensor) -> Tensor:
        bad = ~torch.isfinite(value)
        if self._sigmas is not None:
            # In logarithms: these values vary by factors, and their distribution has a long upper tail.
            known, logs = ~torch.isnan(self.values), self.values.clamp(min=SMALLEST).log()
            count = known.sum()
            mean = torch.nansum(logs) / count.clamp(min=1)
            spread = torch.where(known, logs - mean, 0.0).square().sum() / count.clamp(min=1)
            above = value.clamp(min=SMALLEST).log() - mean
            bad = bad | (
                (count >= AT_LEAST) & (above > (self._sigmas * spread.sqrt()).clamp(min=self._least))
            )
        return bad

    def add(self, value: Tensor, good: Tensor) -> None:
        slot = good & (self._slots == self.count % WINDOW)
        self.values = torch.where(slot, value, self.values)
        self.count = self.count + good


class BadSteps(Callback):
    """``sigmas`` above the mean is a spike (None: only NaN and Inf are bad)."""

    def __init__(self, sigmas: float | None, roll_back_after: int) -> None:
        self._sigmas, self._limit = sigmas, roll_back_after
        self._detectors: dict[str, SpikeDetector] = {}
        self._skipped = self._in_a_row = torch.zeros((), dtype=torch.int64)

    def on_start(self, trainer: Trainer) -> None:
        device = trainer.grid.device
        self._detectors = {
            name: SpikeDetector(self._sigmas, least, device) for name, least in LEAST_SPIKE.items()
        }
        self._skipped = self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        saved = trainer.training.beside.get("numbers")
        if saved is None:
            return
        for name, detector in self._detectors.items():
            # A window of another length, from another version, is not used.
            if len(saved[name]) == WINDOW:
                values = [torch.nan if value is None else value for value in saved[name]]
                detector.values = torch.tensor(values, dtype=torch.float32, device=device)
                detector.count = torch.tensor(int(saved["taken"]), device=device)
        self._skipped = torch.tensor(int(saved["skipped"]), device=device)
        self._in_a_row = torch.tensor(int(saved.get("in_a_row", 0)), device=device)

    def on_rollback(self, trainer: Trainer) -> None:
        skipped = self._skipped
        self.on_start(trainer)
        # Skipped steps stay counted after a rollback; a replica whose state was copied may have counted more.
        self._skipped = torch.maximum(skipped, self._skipped)

    def should_skip(self, trainer: Trainer, loss: Tensor, norm: Tensor | None) -> Tensor:
        values = {"loss": loss.detach().float()} | ({"norm": norm.float()} if norm is not None else {})
        bad = torch.zeros((), dtype=torch.bool, device=loss.device)
        for name, value in values.items():
            bad = bad | self._detectors[name].is_bad(value)
        # The values are the same on all ranks but for an ulp, unless a sum itself went wrong on one of them.
        flag = bad.int()
        for axis in AXES:
            trainer.grid.collectives.all_reduce(flag, axis, "check", dist.ReduceOp.MAX).wait()
        bad = flag.bool()
        for name, value in values.items():
            self._detectors[name].add(value, ~bad)
        self._skipped = self._skipped + bad
        self._in_a_row = (self._in_a_row + 1) * bad
        return bad

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        reads = not result.loss.is_cuda or result.step % trainer.run.reliability.check_every_steps == 0
        in_a_row = int(self._in_a_row) if reads else 0
        if in_a_row:
            found = result.gradient_norm
            values = f"loss {float(result.loss):g}" + (
                "" if found is None else f", gradient norm {float(found):g}"
            )
            trainer.warn(f"step {result.step} left the weights unchanged: {values}; {in_a_row} in a row")
        if in_a_row >= self._limit:
            trainer.rollbacks.request(result.step - in_a_row + 1, f"{in_a_row} bad steps in a row")
        if trainer.is_first and is_logged(trainer, result.step):
            result.metrics["skipped_steps"] = float(self._skipped)
            result.metrics["rollbacks"] = float(trainer.rollbacks.count)

    def on_save(self, trainer: Trainer) -> None:
        values = {
            name: [None if value != value else value for value in detector.values.tolist()]
            for name, detector in self._detectors.items()
        }
        taken = int(self._detectors["loss"].count)
        counts = {"taken": taken, "skipped": int(self._skipped), "in_a_row": int(self._in_a_row)}
        trainer.training.beside["numbers"] = values | counts
