"""Stragglers: name the rank that spends more time in its steps than the others, without the time it waits for them.

All ranks do the same work, so a rank that takes longer has a slow or hot device or a busy host, and all others wait for it.
On an interval all ranks learn the longest time, its rank, and the mean: three values for any number of ranks. With FSDP2
on CUDA waits are not measured, and no rank seems slower than another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged

INTERVALS = 3  # that are judged together
LEAST_S = 1.0  # of them: random disturbances of a host last for some tenths of a second
_RANKS = 1 << 24  # packs a time in microseconds and a rank into one integer


class Stragglers(Callback):
    """Names a rank that is ``factor`` times as slow as the others, over the last three intervals; more, if steps are short.

    Other work on a host makes steps longer, never shorter. So the lower quartile of the slow rank's steps is compared with
    the upper quartile of the others'.
    """

    def __init__(self, every_steps: int, factor: float) -> None:
        self._every, self._factor = every_steps, factor
        self._is_measured = False
        self._results: list[StepResult] = []  # of measured steps since the last comparison, as is the next
        self._waits_s: list[float] = []
        self._own_s: list[list[float]] = []  # of this rank, by interval, the newest last
        self._intervals = INTERVALS
        self.named: dict[int, float] = {}  # rank: how many times as slow

    def on_start(self, trainer: Trainer) -> None:
        self._results, self._waits_s, self._own_s = [], [], []

    on_rollback = on_start

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        # On CUDA measuring waits for the device: once per interval.
        self._is_measured = trainer.grid.device.type != "cuda" or (trainer.step + 1) % self._every == 0
        if not self._is_measured:
            yield
            return
        with trainer.grid.collectives.counting() as entries:
            yield
        self._waits_s.append(sum(entry.exposed_s for entry in entries))

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if dist.get_world_size() == 1:
            return
        if self._is_measured:
            self._results.append(result)
        if result.step % self._every == 0:
            # A failed step was measured, and has no result.
            waits_s = self._waits_s[-len(self._results) :]
            steps = zip(self._results, waits_s, strict=True)
            self._own_s.append([max(0.0, step.seconds - wait_s) for step, wait_s in steps])
            self._results, self._waits_s = [], []
            self._compare(trainer, result.step)
        if trainer.is_first and is_logged(trainer, result.step) and self.named:
            result.metrics["straggler"] = float(max(self.named, key=lambda rank: self.named[rank]))

    def _compare(self, trainer: Trainer, step: int) -> None:
        own_s = sorted(second for interval in self._own_s for second in interval)
        rank, longest_s, others_s = slowest(trainer, own_s[len(own_s) // 4], own_s[3 * len(own_s) // 4])
        # From here on all ranks use the same values, so that they agree.
        if len(self._own_s) >= self._intervals:
            self._judge(trainer, step, rank, longest_s, others_s)
        self._intervals = max(INTERVALS, math.ceil(LEAST_S / max(longest_s * self._every, 1e-6)))
        self._own_s = self._own_s[1 - self._intervals :]

    def _judge(self, trainer: Trainer, step: int, rank: int, longest_s: float, others_s: float) -> None:
        if longest_s <= self._factor * others_s:
            self.named.clear()
            return
        times = longest_s / max(others_s, 1e-9)
        if rank not in self.named:
            trainer.warn(
                f"step {step}: rank {rank} is slow: {longest_s:.3g} s without waits in a good step, {times:.2f} times as long as "
                f"the others in a bad one ({others_s:.3g} s); all wait for it"
            )
        self.named[rank] = times


def slowest(trainer: Trainer, good_s: float, disturbed_s: float) -> tuple[int, float, float]:
    """(the rank whose good steps are the longest, their time, the mean time of the others' disturbed steps)."""
    grid, ranks = trainer.grid, dist.get_world_size()
    longest = torch.tensor([round(good_s * 1e6) * _RANKS + dist.get_rank()], device=grid.device)
    for axis in AXES:
        grid.collectives.all_reduce(longest, axis, "check", dist.ReduceOp.MAX).wait()
    longest_micros, rank = divmod(int(longest), _RANKS)
    total = torch.tensor([0 if rank == dist.get_rank() else round(disturbed_s * 1e6)], device=grid.device)
    for axis in AXES:
        grid.collectives.all_reduce(total, axis, "check").wait()
    return rank, longest_micros / 1e6, int(total) / 1e6 / max(1, ranks - 1)
