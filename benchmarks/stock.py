"""The opponent of a run: its file read by nothing but transformers and PyTorch, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fourfold.config.schema import RunConfig
from fourfold.data.manifest import Split
from fourfold.data.mixture import Mixture, open_mixture
from fourfold.train.loop.optimizers import learning_rate_factor


class Stock:
    """The model of transformers from the run's pretrained weights, torch.optim.AdamW, and the run's samples.

    With ``adapted`` it is the model that this makes of it, such as PEFT's; what is frozen there is not trained.
    """

    def __init__(self, run: RunConfig, adapted: Callable[[Any], Any] = lambda model: model) -> None:
        self.run = run
        pretrained = AutoModelForCausalLM.from_pretrained(run.model.pretrained)
        self.model: PreTrainedModel = adapted(pretrained).train()
        section = run.optimizer
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        decaying = [p for p in parameters if p.ndim >= 2]
        others = [p for p in parameters if p.ndim < 2]
        groups = [
            {"params": decaying, "weight_decay": section.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
        )
        self.mixture = mixture_of(run)
        self.steps_done = 0

    def batch(self, step: int) -> dict[str, Tensor]:
        """The rows of a step, from 0."""
        return rows(self.mixture, step * self.run.sequences, self.run.sequences)

    def step(self, batch: dict[str, Tensor] | None = None) -> float:
        """A step on the whole batch at once; its loss."""
        batch = batch or self.batch(self.steps_done)
        loss: Tensor = self.model(**batch, use_cache=False).loss
        loss.backward()
        if self.run.optimizer.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optimizer.grad_clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.optimizer.lr * learning_rate_factor(self.run.schedule, self.steps_done)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return float(loss.detach())

    def losses(self) -> Iterator[tuple[int, float]]:
        """(step, loss) of the whole run."""
        while self.steps_done < self.run.schedule.steps:
            loss = self.step()
            yield self.steps_done, loss

    def validation_loss(self) -> float:
        batch = rows(mixture_of(self.run, "validation"), 0, self.run.evaluation.sequences)
        self.model.eval()
        with torch.no_grad():
            loss = float(self.model(**batch, use_cache=False).loss)
        self.model.train()
        return loss


def mixture_of(run: RunConfig, split: Split = "train") -> Mixture:
    sources = [(source.path, source.weight) for source in run.data.sources]
    return open_mixture(sources, length=run.data.sequence_length, seed=run.seed, split=split)


def rows(mixture: Mixture, first: int, count: int) -> dict[str, Tensor]:
    """Samples as a Hugging Face model takes them."""
    samples = mixture.samples(first, first + count)
    names = ("input_ids", "labels", "position_ids")
    stacked = (torch.from_numpy(np.stack(column)) for column in zip(*samples, strict=True))
    return dict(zip(names, stacked, strict=True))
