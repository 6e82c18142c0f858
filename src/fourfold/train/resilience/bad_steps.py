"""Steps whose numbers are bad leave the weights as they are, on all ranks alike; several in a row, and the run goes back.

The loss and the norm of the gradient are the same on all ranks of a replica, so what follows from them is too, without a
word between them; replicas tell each other. On CUDA all of it stays on the device; the host looks when weights are
compared (`check_every_steps`).
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged

WINDOW = 128  # steps that say what is usual
AT_LEAST = 20  # of them, before anything is far from it
# However steady a run is, less than this is no spike: the logarithm of how many times the usual.
LEAST_SPIKE = {"loss": math.log(1.2), "norm": math.log(2.0)}
SMALLEST = 1e-30


class Usual:
    """The last good values of a figure, and whether another is far above them."""

    def __init__(self, sigmas: float | None, least: float, device: torch.device) -> None:
        self._sigmas, self._least = sigmas, least
        self.values = torch.full((WINDOW,), torch.nan, dtype=torch.float32, device=device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(WINDOW, device=device)

    def is_far(self, value: Tensor) -> Tensor:
        far = ~torch.isfinite(value)
        if self._sigmas is not None:
            # In logarithms: what is usual varies by factors, and its distribution has a long end above.
            known, logs = ~torch.isnan(self.values), self.values.clamp(min=SMALLEST).log()
            count = known.sum()
            mean = torch.nansum(logs) / count.clamp(min=1)
            spread = torch.where(known, logs - mean, 0.0).square().sum() / count.clamp(min=1)
            above = value.clamp(min=SMALLEST).log() - mean
            far = far | (
                (count >= AT_LEAST) & (above > (self._sigmas * spread.sqrt()).clamp(min=self._least))
            )
        return far

    def take(self, value: Tensor, good: Tensor) -> None:
        here = good & (self._places == self.taken % WINDOW)
        self.values = torch.where(here, value, self.values)
        self.taken = self.taken + good


class BadSteps(Callback):
    """``sigmas`` above the usual is a spike (None: only what is no number is bad)."""

    def __init__(self, sigmas: float | None, roll_back_after: int) -> None:
        self._sigmas, self._limit = sigmas, roll_back_after
        self._usual: dict[str, Usual] = {}
        self._skipped = self._in_a_row = torch.zeros((), dtype=torch.int64)

    def on_start(self, trainer: Trainer) -> None:
        device = trainer.grid.device
        self._usual = {name: Usual(self._sigmas, least, device) for name, least in LEAST_SPIKE.items()}
        self._skipped = self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        saved = trainer.training.beside.get("numbers")
        if saved is None:
            return
        for name, usual in self._usual.items():
            # A window of another length, of another version, is begun anew.
            if len(saved[name]) == WINDOW:
                values = [torch.nan if value is None else value for value in saved[name]]
                usual.values = torch.tensor(values, dtype=torch.float32, device=device)
                usual.taken = torch.tensor(int(saved["taken"]), device=device)
        self._skipped = torch.tensor(int(saved["skipped"]), device=device)
        self._in_a_row = torch.tensor(int(saved.get("in_a_row", 0)), device=device)

    def on_rollback(self, trainer: Trainer) -> None:
        skipped = self._skipped
        self.on_start(trainer)
        # They were, also if the run does not remember; a replica that was copied may remember more.
        self._skipped = torch.maximum(skipped, self._skipped)

    def refuses(self, trainer: Trainer, loss: Tensor, norm: Tensor | None) -> Tensor:
        values = {"loss": loss.detach().float()} | ({"norm": norm.float()} if norm is not None else {})
        bad = torch.zeros((), dtype=torch.bool, device=loss.device)
        for name, value in values.items():
            bad = bad | self._usual[name].is_far(value)
        if trainer.grid.data > 1:
            # Replicas sum their gradients, so they see the same, unless a sum itself went wrong on one of them.
            flag = bad.int()
            trainer.grid.collectives.all_reduce(flag, "data", "check", dist.ReduceOp.MAX).wait()
            bad = flag.bool()
        for name, value in values.items():
            self._usual[name].take(value, ~bad)
        self._skipped = self._skipped + bad
        self._in_a_row = (self._in_a_row + 1) * bad
        return bad

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        looks = not result.loss.is_cuda or result.step % trainer.run.reliability.check_every_steps == 0
        in_a_row = int(self._in_a_row) if looks else 0
        if in_a_row and trainer.is_first:
            norm = (
                ""
                if result.gradient_norm is None
                else f", norm of the gradient {float(result.gradient_norm):g}"
            )
            print(
                f"step {result.step} left the weights as they are: loss {float(result.loss):g}{norm}; {in_a_row} in a row",
                file=sys.stderr,
                flush=True,
            )
        if in_a_row >= self._limit:
            trainer.back.ask(result.step - in_a_row + 1, f"{in_a_row} bad steps in a row")
        if trainer.is_first and is_logged(trainer, result.step):
            result.figures["skipped_steps"] = float(self._skipped)
            result.figures["rollbacks"] = float(trainer.back.count)

    def on_save(self, trainer: Trainer) -> None:
        values = {
            name: [None if value != value else value for value in usual.values.tolist()]
            for name, usual in self._usual.items()
        }
        taken = int(self._usual["loss"].taken)
        counts = {"taken": taken, "skipped": int(self._skipped), "in_a_row": int(self._in_a_row)}
        trainer.training.beside["numbers"] = values | counts
