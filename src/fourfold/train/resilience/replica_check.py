"""Silent corruption: replicas of the same weights compare a hash on an interval, and name the one that differs.

Replicas add up the same gradients and take the same steps, so their weights are equal bit for bit. A device that computes
wrongly, or memory that forgets, changes one of them; no loss shows it for long. The same is compared before each save:
what is saved was agreed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.mesh.axes import Axis
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.resilience.hang.summary import group_of

# Odd numbers, so that no bit is lost in a product modulo 2^64: the golden ratio, as multiplicative hashing has it.
_MIX = -0x61C8864680B583EB
_AT_ONCE = 1 << 24
_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def hash_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of all bits that this rank holds: 64 of them, on its device. A single flipped bit always changes it."""
    total: Tensor | None = None
    for parameter in parameters:
        shard = cast(DTensor, parameter).to_local()
        if not shard.numel():
            continue
        bits = shard.reshape(-1).view(_VIEWS[shard.element_size()])
        # In pieces: a sum in wider numbers may make a copy of what it adds up.
        for piece in bits.split(_AT_ONCE):
            part = piece.sum(dtype=torch.int64)
            total = part if total is None else total * _MIX + part
    return torch.zeros((), dtype=torch.int64) if total is None else total


def odd_ones(hashes: Sequence[int]) -> list[int]:
    """Which of them differ from most; all, if there is no majority.

    Example:
        >>> odd_ones([7, 7, 3]), odd_ones([7, 7]), odd_ones([7, 3])
        ([2], [], [0, 1])
    """
    counts = Counter(hashes)
    usual, times = counts.most_common(1)[0]
    if len(counts) == 1:
        return []
    if 2 * times > len(hashes):
        return [i for i, value in enumerate(hashes) if value != usual]
    return list(range(len(hashes)))


class ReplicaConsistencyCheck(Callback):
    """Nothing to do where no rank has a replica: data=1."""

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps
        self._agreed_at = 0  # the last step, or the checkpoint that the run goes on from

    def on_start(self, trainer: Trainer) -> None:
        self._agreed_at = trainer.step

    def on_rollback(self, trainer: Trainer) -> None:
        self._agreed_at = trainer.step

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self._every == 0:
            self._compare(trainer)

    def on_save(self, trainer: Trainer) -> None:
        if self._agreed_at != trainer.step:
            self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        if trainer.grid.data == 1:
            return
        lowest, highest = self._odd_ranks(trainer)
        if highest < 0:
            self._agreed_at = trainer.step
            return
        who = f"rank {highest}" if lowest == highest else f"ranks {lowest} to {highest}"
        hint = (
            ""
            if lowest == highest
            else " (two replicas cannot say which of them; with three the majority would)"
        )
        why = f"the weights of {who} are not those of the replicas{hint}: check the device and memory of that host"
        trainer.back.ask(self._agreed_at + 1, why, by_chance=True)

    def _odd_ranks(self, trainer: Trainer) -> tuple[int, int]:
        """The lowest and the highest rank of the grid whose weights are not those of its replicas; -1 for none."""
        grid = trainer.grid
        mine = hash_of(trainer.model.parameters()).to(grid.device).view(1)
        hashes = mine.new_empty(grid.data)
        grid.collectives.all_gather(hashes, mine, "data", "check").wait()
        replicas = group_of(dist.get_rank(), "data", grid.shape)
        odd = [replicas[i] for i in odd_ones(hashes.tolist())]
        none = -grid.mesh.size()
        found = torch.tensor([max(odd, default=-1), -min(odd) if odd else none], device=grid.device)
        # Also those learn it whose own replicas agree: all ranks go back together.
        axes: tuple[Axis, ...] = ("x", "y", "z")
        for axis in axes:
            grid.collectives.all_reduce(found, axis, "check", dist.ReduceOp.MAX).wait()
        highest, lowest = found.tolist()
        return -lowest, highest
