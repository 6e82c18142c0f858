"""The validation loss, on the same samples each time."""

from __future__ import annotations

import torch

from fourfold.data.loader import Loader
from fourfold.parallel.loss.head import IGNORE_INDEX
from fourfold.train.loop.trainer import Callback, StepResult, Trainer, open_data
from fourfold.weights.api import evaluating


class Evaluation(Callback):
    """Every ``every_steps`` steps and at the end: the mean over the tokens of all samples."""

    def __init__(self, sequences: int, every_steps: int | None) -> None:
        self._sequences, self._every = sequences, every_steps
        self._loader: Loader

    def on_start(self, trainer: Trainer) -> None:
        run, grid = trainer.run, trainer.grid
        read = -(-self._sequences // grid.batch_ranks) * grid.batch_ranks
        self._own = max(0, self._sequences - grid.local_rows(read).start)
        self._loader = Loader(open_data(run, "validation"), grid, read, prefetch_batches=0)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.is_done or (self._every is not None and result.step % self._every == 0):
            with trainer.timed("evaluation"):
                result.metrics["validation_loss"] = self.loss(trainer)

    def loss(self, trainer: Trainer) -> float:
        """Evaluate in micro-batches of the training step's size, so that evaluation needs no more memory."""
        batch = self._loader.read(0)
        # All ranks have as many rows, so that their collectives meet. What is too many does not count.
        batch.inputs["labels"][self._own :] = IGNORE_INDEX
        counted, parts = trainer.split(batch)
        total = torch.zeros((), device=trainer.grid.device)
        with evaluating(trainer.model):
            for part in parts:
                total += trainer.model(**part, num_items_in_batch=counted.clamp(min=1)).loss
        return float(total)
