"""Going back to a checkpoint without a restart: once as it was, then past the samples that it failed on.

What goes wrong by chance, in a device or a link, does not do so again: the same steps are done once more, and the run ends
as if nothing had been. What goes wrong again is in the numbers themselves, or in the text.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from fourfold.checkpoint.save import Checkpoints
from fourfold.checkpoint.state import TrainState


class RollbackFailed(ValueError):
    """Nothing is mended by going back, nor by starting again: a person has to look."""


class Rollbacks:
    """Those of one run. What asks for one asks on all ranks alike."""

    def __init__(self) -> None:
        self.count = 0
        self._asked: tuple[int, str, bool] | None = None
        self._went_to: dict[int, int] = {}  # how often, by the step of the checkpoint

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    @property
    def why(self) -> str:
        return self._asked[1] if self._asked is not None else ""

    def ask(self, before: int, why: str, *, by_chance: bool = False) -> None:
        """After this step, go back to the newest checkpoint from before step ``before``.

        ``by_chance``: it is the device's fault for certain, and no sample is to be left out for it.
        """
        if self._asked is None:
            self._asked = (before, why, by_chance)

    def go(self, training: TrainState, checkpoints: Checkpoints | None) -> None:
        assert self._asked is not None
        (before, why, by_chance), self._asked = self._asked, None
        failed_at, samples = training.step, training.data["samples"]
        step = checkpoints.load(training, before=before) if checkpoints is not None else None
        if step is None:
            raise RollbackFailed(
                f"step {failed_at}: {why}, and there is no checkpoint from before step {before} to go back to; use a smaller "
                "checkpoints.every_steps"
            )
        self.count += 1
        times = self._went_to[step] = self._went_to.get(step, 0) + 1
        if times > 2:
            raise RollbackFailed(
                f"step {failed_at}: {why}, also after the checkpoint of step {step} was gone back to twice; look at the text behind "
                f"sample {training.data['samples']}, or use a smaller optimizer.lr"
            )
        words = "the same steps are done once more"
        if times == 2 and not by_chance:
            training.data["samples"] = samples
            words = "it goes on behind the samples that it failed on"
        if dist.get_rank() == 0:
            print(
                f"step {failed_at}: {why}; back to the checkpoint of step {step}: {words}",
                file=sys.stderr,
                flush=True,
            )
