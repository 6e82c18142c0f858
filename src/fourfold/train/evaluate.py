"""The loss on text that is not trained on, the same samples each time."""

from __future__ import annotations

import torch

from fourfold.parallel.loss import count_labels
from fourfold.train.data.loader import Loader
from fourfold.train.data.mixture import open_mixture
from fourfold.train.trainer import Callback, StepResult, Trainer


class Evaluation(Callback):
    """Every so many steps, and at the end; the mean over the tokens of all its samples."""

    def __init__(self, trainer_sequences: int, every_steps: int | None) -> None:
        self._sequences, self._every = trainer_sequences, every_steps
        self._loader: Loader | None = None

    def on_start(self, trainer: Trainer) -> None:
        run = trainer.run
        sources = [(source.path, source.weight) for source in run.data.sources]
        mixture = open_mixture(sources, length=run.data.sequence_length, seed=run.seed, split="validation")
        batch_ranks = trainer.grid.data * trainer.grid.z
        # As many as divide: no rank may be without a sample.
        sequences = max(batch_ranks, self._sequences // batch_ranks * batch_ranks)
        self._loader = Loader(mixture, trainer.grid, sequences, read_ahead=0)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        is_last = result.step == trainer.run.schedule.steps
        if is_last or (self._every is not None and result.step % self._every == 0):
            result.figures["validation_loss"] = self.loss(trainer)

    def loss(self, trainer: Trainer) -> float:
        assert self._loader is not None
        batch = self._loader.read(0)
        inputs = {name: tensor.to(trainer.grid.device) for name, tensor in batch.inputs.items()}
        counted = count_labels(inputs["labels"], trainer.grid, shift=True)
        trainer.model.eval()
        try:
            with torch.no_grad():
                return float(trainer.model(**inputs, num_items_in_batch=counted).loss)
        finally:
            trainer.model.train()
