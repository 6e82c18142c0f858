"""Roll back to a checkpoint without a restart: once as it was, then past the samples on which the run failed.

A random fault, of a device or a link, does not happen again: the same steps are repeated, and the run ends as if nothing
had happened. What happens again is caused by the training itself, or by the data.
"""

from __future__ import annotations

from fourfold.checkpoint.save import Checkpoints
from fourfold.checkpoint.state import TrainState


class RollbackFailed(ValueError):
    """Neither a rollback nor a restart helps: a person has to look."""


class Rollbacks:
    """The rollbacks of one run. Request them on all ranks alike."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""  # of the last request
        self._requested: tuple[int, bool] | None = None
        self._times: dict[int, int] = {}  # by the step of the checkpoint

    @property
    def is_requested(self) -> bool:
        return self._requested is not None

    def request(self, before: int, reason: str, *, random_fault: bool = False) -> None:
        """After this step, roll back to the newest checkpoint from before step ``before``.

        ``random_fault``: the hardware is certainly the cause, so no samples are skipped.
        """
        if self._requested is None:
            self._requested, self.reason = (before, random_fault), reason

    def roll_back(self, training: TrainState, checkpoints: Checkpoints | None) -> str:
        """Do what was requested; returns a message."""
        assert self._requested is not None
        (before, random_fault), self._requested = self._requested, None
        reason = self.reason
        failed_at, samples = training.step, training.data["samples"]
        step = checkpoints.load(training, before=before) if checkpoints is not None else None
        if step is None:
            raise RollbackFailed(
                f"step {failed_at}: {reason}, and there is no checkpoint from before step {before} to roll back to; use a "
                "smaller checkpoints.every_steps"
            )
        self.count += 1
        times = self._times[step] = self._times.get(step, 0) + 1
        if times > 2:
            raise RollbackFailed(
                f"step {failed_at}: {reason}, also after two rollbacks to the checkpoint of step {step}; look at the data after "
                f"sample {training.data['samples']}, or use a smaller optimizer.lr"
            )
        action = "the same steps are repeated"
        if times == 2 and not random_fault:
            training.data["samples"] = samples
            action = "the samples on which it failed are skipped"
        return f"step {failed_at}: {reason}; rolled back to the checkpoint of step {step}: {action}"
