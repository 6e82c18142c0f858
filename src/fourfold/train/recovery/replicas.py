"""The interface of `TorchFTManager` for a run that is a single job, as most are: no other jobs take part in a step."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fourfold.checkpoint.save import Checkpoints
from fourfold.checkpoint.state import TrainState
from fourfold.data.loader import Batch, Loader


class SingleReplica:
    """Replicas of such a run, if there are any, are on the grid's data axis."""

    planned = 1  # replicas when all are running
    index = 0  # of this one among those that take part in the step

    def batches(self, training: TrainState, loader: Loader) -> Iterator[Batch]:
        """This rank's rows of each step, from the step that ``training`` has reached."""
        return loader.batches(int(training.data["samples"]))

    def start_step(self) -> None:
        """Agree on which replicas take part in the next step."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the replicas, in place."""
        return tensor

    def sum_gradients(self, loss: Tensor) -> bool:
        """Sum gradients and ``loss`` over the replicas, in place; False if the step has to be repeated."""
        return True

    def metrics(self) -> dict[str, float]:
        return {}

    def saves(self, step: int, checkpoints: Checkpoints) -> bool:
        """Does this replica save the checkpoint of ``step``?"""
        return True

    def close(self) -> None:
        """End the run."""
