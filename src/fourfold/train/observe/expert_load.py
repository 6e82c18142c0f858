"""Metrics of how evenly tokens are spread over experts."""

from __future__ import annotations

from torch import Tensor

from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged


class ExpertLoadMetrics(Callback):
    """Counts since the last logged step, over all ranks. Put it before all callbacks that show metrics."""

    def __init__(self) -> None:
        self._tokens = 0  # since the last reading

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._tokens += result.tokens
        if is_logged(trainer, result.step):
            assert trainer.experts.load is not None
            counts = trainer.experts.take_counts()  # on all ranks
            if trainer.is_first:
                sizes, choices = trainer.experts.load.experts, trainer.experts.load.choices
                result.metrics |= load_metrics(counts, sizes, self._tokens * sum(choices))
            self._tokens = 0

    def on_rollback(self, trainer: Trainer) -> None:
        trainer.experts.take_counts()
        self._tokens = 0


def load_metrics(counts: Tensor, experts: list[int], expected: int) -> dict[str, float]:
    """Of the choices of each layer and expert, [layers, experts]; ``expected``: how many choices the tokens had.

    Example:
        >>> import torch
        >>> counts = torch.tensor([[4, 4, 4, 4], [10, 2, 4, 0]])
        >>> load_metrics(counts, [4, 4], 32)["expert_load"]
        2.5
    """
    layers = [row[:size].tolist() for row, size in zip(counts.cpu(), experts, strict=True)]
    loads = [max(row) * len(row) / max(1, sum(row)) for row in layers]
    return {
        # The largest number of tokens of an expert over the mean: of the worst layer, and the mean of the layers.
        "expert_load": max(loads),
        "expert_load_mean": sum(loads) / len(loads),
        "expert_largest_share": max(max(row) / max(1, sum(row)) for row in layers),
        "expert_tokens_max": max(map(max, layers)),
        "expert_tokens_mean": sum(map(sum, layers)) / sum(experts),
        "expert_tokens_min": min(map(min, layers)),
        "expert_idle": sum(count == 0 for row in layers for count in row),
        "expert_dropped": expected - sum(map(sum, layers)),
    }
