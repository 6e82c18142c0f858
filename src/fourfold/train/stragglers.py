"""The slow rank, by name: of the time of its steps, what it did not spend waiting for others.

All ranks of a run do the same work, so a rank that takes longer has a slow device, a busy host or a hot one; everybody else
waits for it. On an interval all learn the longest time, whose it is, and the mean: three numbers, whatever the number of
ranks. With FSDP2 on CUDA its waits are not in the account, and no rank seems slower than another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fourfold.grid import AXES
from fourfold.train.meter import is_logged
from fourfold.train.trainer import Callback, StepResult, Trainer

_RANKS = 1 << 24  # a time in microseconds and a rank in one number


class Stragglers(Callback):
    """Named when it is ``factor`` times as slow as the mean of the others, in two intervals in a row."""

    def __init__(self, every_steps: int, factor: float) -> None:
        self._every, self._factor = every_steps, factor
        self._results: list[StepResult] = []  # since the last comparison, as what follows
        self._waited_s = self._before_s = 0.0
        self._suspect = -1
        self.named: dict[int, float] = {}  # rank: how many times as slow

    def on_start(self, trainer: Trainer) -> None:
        self._results, self._waited_s, self._suspect = [], 0.0, -1

    def on_rollback(self, trainer: Trainer) -> None:
        self.on_start(trainer)

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        # What an evaluation waits for is not of a step. On CUDA a reading waits for the device: one for an interval.
        is_cuda = trainer.grid.device.type == "cuda"
        if not is_cuda or not self._results:
            self._before_s = _waited_s(trainer)
        yield
        if not is_cuda or (trainer.step + 1) % self._every == 0:
            self._waited_s += _waited_s(trainer) - self._before_s

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if dist.get_world_size() == 1:
            return
        self._results.append(result)
        if result.step % self._every == 0:
            steps_s = sum(r.seconds for r in self._results)
            own_s = max(0.0, steps_s - self._waited_s) / len(self._results)
            self._results, self._waited_s = [], 0.0
            self._judge(trainer, result.step, *slowest(trainer, own_s))
        if trainer.is_first and is_logged(trainer, result.step) and self.named:
            result.figures["straggler"] = float(max(self.named, key=lambda rank: self.named[rank]))

    def _judge(self, trainer: Trainer, step: int, rank: int, longest_s: float, others_s: float) -> None:
        is_slow = longest_s > self._factor * others_s
        if is_slow and rank == self._suspect:
            times = longest_s / max(others_s, 1e-9)
            if rank not in self.named and trainer.is_first:
                print(
                    f"step {step}: rank {rank} is slow: {longest_s:.3g} s of its own in a step, {times:.2f} times the mean of "
                    f"the others ({others_s:.3g} s); all wait for it",
                    file=sys.stderr,
                    flush=True,
                )
            self.named[rank] = times
        elif not is_slow:
            self.named.clear()
        self._suspect = rank if is_slow else -1


def slowest(trainer: Trainer, own_s: float) -> tuple[int, float, float]:
    """(the rank with the longest time, that time, the mean of all others)."""
    grid, ranks = trainer.grid, dist.get_world_size()
    micros = round(own_s * 1e6)
    longest = torch.tensor([micros * _RANKS + dist.get_rank()], device=grid.device)
    total = torch.tensor([micros], device=grid.device)
    for axis in AXES:
        grid.collectives.all_reduce(longest, axis, "check", dist.ReduceOp.MAX).wait()
        grid.collectives.all_reduce(total, axis, "check").wait()
    longest_micros, rank = divmod(int(longest), _RANKS)
    return rank, longest_micros / 1e6, (int(total) - longest_micros) / 1e6 / max(1, ranks - 1)


def _waited_s(trainer: Trainer) -> float:
    return sum(entry.exposed_s for entry in trainer.grid.collectives.account())
