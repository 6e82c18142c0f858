"""The experts of a run: their auxiliary loss, the correction bias of their routers, and the counts of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.config.schema import ExpertsSection
from fourfold.errors import UnsupportedError
from fourfold.parallel.experts.balance import balance_loss_of
from fourfold.parallel.experts.load import CorrectionBias, ExpertLoad
from fourfold.parallel.report import Report


class ExpertTraining:
    """What a run config asks for. On a model without experts, or with nothing asked for, it does nothing."""

    def __init__(self, section: ExpertsSection, model: nn.Module, report: Report) -> None:
        self._balance = balance_loss_of(model)
        is_default = self._balance is not None and self._balance.is_asked
        if section.aux_loss_coef and self._balance is None:
            raise UnsupportedError(
                f"experts.aux_loss_coef={section.aux_loss_coef:g}: {report.model} has no auxiliary loss of routers that is supported; leave it "
                "out, or use experts.bias_rate where its routers have a correction bias"
            )
        self.has_aux_loss = is_default if section.aux_loss_coef is None else section.aux_loss_coef > 0
        if self._balance is not None:
            self._balance.coefficient = section.aux_loss_coef
        # The loss of validation is without it.
        self.inputs_of_evaluation: dict[str, Any] = {"output_router_logits": False} if is_default else {}
        self.inputs: dict[str, Any] = {"output_router_logits": True} if self.has_aux_loss else {}
        self._rate = section.bias_rate
        needs_load = section.bias_rate > 0 or section.load_metrics
        self.load = ExpertLoad(model, report) if needs_load else None
        self.bias = CorrectionBias(model, report, self.load) if self.load and section.bias_rate > 0 else None
        self.has_metrics = section.load_metrics
        self._counts: Tensor | None = None  # since they were taken, where each step needs them

    def start_step(self, micro_batches: int) -> None:
        """The auxiliary loss of a step is the mean of those of its micro-batches."""
        if self._balance is not None:
            self._balance.share = 1 / micro_batches

    def counting(self) -> AbstractContextManager[None]:
        """Around the forward of a micro-batch."""
        return nullcontext() if self.load is None else self.load.counting()

    def losses(self, output: Any) -> tuple[Tensor, Tensor | None]:
        """(the loss of tokens, the part of this micro-batch in the auxiliary loss of the step) of a model's output."""
        aux = output.aux_loss.detach() if self.has_aux_loss else None
        loss: Tensor = output.loss.detach()
        if aux is None:
            return loss, None
        assert self._balance is not None
        return loss - self._balance.weight * aux, self._balance.share * aux

    def update_bias(self, skips: Sequence[Tensor]) -> None:
        """After the optimizer's step, with the flags by which it was skipped."""
        if self.bias is None or self.load is None:
            return
        counts = self.load.take()
        self.bias.update(counts, self._rate, skips)
        if self.has_metrics:
            self._counts = counts if self._counts is None else self._counts + counts

    def take_counts(self) -> Tensor:
        """How many tokens chose each expert of each layer since the last call. All ranks call it."""
        assert self.load is not None
        if self.bias is None:
            return self.load.take()
        counts, self._counts = self._counts, None
        return torch.zeros(0) if counts is None else counts
