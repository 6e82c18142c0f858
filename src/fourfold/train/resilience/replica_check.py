"""Silent data corruption: replicas compare hashes of their weights on an interval and before each save.

Replicas sum the same gradients and take the same steps, so their weights are bit-identical. A faulty device or memory changes
one of them, and the loss does not show it for long. The replica that differs is named, and the run rolls back.
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
from fourfold.train.resilience.hang.summary import axis_group

# Odd, so that no bit is lost in a product modulo 2^64: the golden ratio, as in multiplicative hashing.
_MIX = -0x61C8864680B583EB
_CHUNK = 1 << 24
_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def weight_hash(parameters: Iterable[nn.Parameter]) -> Tensor:
    """A 64-bit hash of all bits that this rank holds, on its device. A single flipped bit always changes it."""
    total: Tensor | None = None
    for parameter in parameters:
        shard = cast(DTensor, parameter).to_local()
        if not shard.numel():
            continue
        bits = shard.reshape(-1).view(_VIEWS[shard.element_size()])
        # In chunks: a sum in a wider dtype may copy its input.
        for chunk in bits.split(_CHUNK):
            part = chunk.sum(dtype=torch.int64)
            total = part if total is None else total * _MIX + part
    return torch.zeros((), dtype=torch.int64) if total is None else total


def minority(hashes: Sequence[int]) -> list[int]:
    """The indices that differ from the majority; all, if there is no majority.

    Example:
        >>> minority([7, 7, 3]), minority([7, 7]), minority([7, 3])
        ([2], [], [0, 1])
    """
    counts = Counter(hashes)
    majority, times = counts.most_common(1)[0]
    if len(counts) == 1:
        return []
    if 2 * times > len(hashes):
        return [i for i, value in enumerate(hashes) if value != majority]
    return list(range(len(hashes)))


class ReplicaConsistencyCheck(Callback):
    """Compares weights every ``every_steps`` steps; without effect if data=1."""

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps
        # The last step at which all replicas agreed, or the checkpoint that the run resumed from.
        self._agreed_at = 0

    def on_start(self, trainer: Trainer) -> None:
        self._agreed_at = trainer.step

    on_rollback = on_start

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self._every == 0:
            self._compare(trainer)

    def on_save(self, trainer: Trainer) -> None:
        if self._agreed_at != trainer.step:
            self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        if trainer.grid.data == 1:
            return
        lowest, highest = self._differing_ranks(trainer)
        if highest < 0:
            self._agreed_at = trainer.step
            return
        who, hint = f"rank {highest}", ""
        if lowest != highest:
            who = f"ranks {lowest} to {highest}"
            hint = " (two replicas cannot tell which of them is wrong; with three the majority would)"
        reason = f"the weights of {who} differ from those of the replicas{hint}: check the device and memory of that host"
        trainer.rollbacks.request(self._agreed_at + 1, reason, random_fault=True)

    def _differing_ranks(self, trainer: Trainer) -> tuple[int, int]:
        """The lowest and the highest rank whose weights differ from those of its replicas; -1 as the highest: none."""
        grid = trainer.grid
        mine = weight_hash(trainer.model.parameters()).to(grid.device).view(1)
        hashes = mine.new_empty(grid.data)
        grid.collectives.all_gather(hashes, mine, "data", "check").wait()
        replicas = axis_group(dist.get_rank(), "data", grid.shape)
        differing = [replicas[i] for i in minority(hashes.tolist())]
        none = -grid.mesh.size()
        found = torch.tensor(
            [max(differing, default=-1), -min(differing) if differing else none], device=grid.device
        )
        # Ranks whose own replicas agree learn it too: all ranks roll back together.
        axes: tuple[Axis, ...] = ("x", "y", "z")
        for axis in axes:
            grid.collectives.all_reduce(found, axis, "check", dist.ReduceOp.MAX).wait()
        highest, lowest = found.tolist()
        return -lowest, highest
