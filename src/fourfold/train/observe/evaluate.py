"""The validation loss, on the same samples each time."""

from __future__ import annotations

import torch

from fourfold.data.loader import Loader
from fourfold.data.mixture import open_mixture
from fourfold.parallel.loss import count_labels
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.weights.api import evaluating


class Evaluation(Callback):
    """Every ``every_steps`` steps and at the end: the mean over the tokens of all samples."""

    def __init__(self, sequences: int, every_steps: int | None) -> None:
        self._sequences, self._every = sequences, every_steps
        self._loader: Loader | None = None

    def on_start(self, trainer: Trainer) -> None:
        run, grid = trainer.run, trainer.grid
        sources = [(source.path, source.weight) for source in run.data.sources]
        mixture = open_mixture(sources, length=run.data.sequence_length, seed=run.seed, split="validation")
        if self._sequences % grid.batch_ranks:
            near = -(-self._sequences // grid.batch_ranks) * grid.batch_ranks
            raise ValueError(
                f"evaluation.sequences={self._sequences} does not divide over data*z = {grid.batch_ranks} ranks; use {near}"
            )
        self._loader = Loader(mixture, grid, self._sequences, read_ahead=0)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.is_done or (self._every is not None and result.step % self._every == 0):
            with trainer.timed("evaluation"):
                result.metrics["validation_loss"] = self.loss(trainer)

    def loss(self, trainer: Trainer) -> float:
        """Evaluate in micro-batches of the training step's size, so that evaluation needs no more memory."""
        assert self._loader is not None
        batch = self._loader.read(0)
        inputs = {name: rows.to(trainer.grid.device) for name, rows in batch.inputs.items()}
        counted = count_labels(inputs["labels"], trainer.grid, shift=True)
        parts = zip(*(rows.split(trainer.micro_batch_rows) for rows in inputs.values()), strict=True)
        total = torch.zeros((), device=trainer.grid.device)
        with evaluating(trainer.model):
            for rows in parts:
                part = dict(zip(inputs, rows, strict=True))
                total += trainer.model(**part, num_items_in_batch=counted).loss
        return float(total)
