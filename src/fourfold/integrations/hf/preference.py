"""TRL's `DPOTrainer` on a grid: log-probabilities from logits of which a rank has a part, and the reference model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers.utils import ModelOutput

from fourfold.errors import UnsupportedError
from fourfold.integrations.hf.trainer import IGNORED, GridTrainer
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel.linear import without_adapters
from fourfold.parallel.loss.cross_entropy import token_log_probs
from fourfold.parallel.loss.token_statistics import token_statistics
from fourfold.parallel.parallelize import parallelize

_PARTS: tuple[Axis, ...] = ("z", "data")  # of a batch


@dataclass
class TokenScores(ModelOutput):  # type: ignore[misc]  # in which FSDP2 finds the tensor that backward begins with
    """What TRL asks a model for by ``fused_lm_head=True``, in place of logits; of each token but the first."""

    log_probs: Tensor
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


def answer_with_scores(
    model: nn.Module, grid: Grid, needs_scores: Callable[[], bool], *, has_metrics: bool
) -> None:
    """Let a parallel model answer ``model(ids, labels=labels, fused_lm_head=True)`` by `TokenScores`.

    ``needs_scores`` says when a call for logits is an error, because a loss would be made of a part of them.
    """
    inner = model.forward
    vocabulary = int(cast(Any, model).config.get_text_config().vocab_size)

    @functools.wraps(inner)
    def forward(
        *args: Any, fused_lm_head: bool = False, labels: Any = None, scores_alone: bool = False, **given: Any
    ) -> Any:
        if not fused_lm_head:
            if needs_scores():
                raise UnsupportedError(
                    f"{type(model).__name__} is asked for logits, of which a rank has only a part, to compute a loss; "
                    "DPOTrainer asks for log-probabilities since trl 1.15: use that or a later release"
                )
            return inner(*args, **given) if labels is None else inner(*args, labels=labels, **given)
        if given.get("output_router_logits"):
            raise UnsupportedError(
                "router_aux_loss_coef: it would be the loss of a part of the batch; use router_aux_loss_coef=0"
            )
        logits = inner(*args, **given).logits
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        scores = TokenScores(token_log_probs(logits, targets, grid, vocab_size=vocabulary)[:, :-1])
        if has_metrics and not scores_alone:
            found = token_statistics(logits, targets, grid, vocab_size=vocabulary)
            metrics = zip(("entropy", "mean_logits", "is_top1", "log_sum_sq_probs"), found, strict=True)
            for name, values in metrics:
                scores[name] = values[:, :-1]
        return scores

    model.forward = forward


class WithoutAdapters(nn.Module):
    """The reference that a model with adapters is without them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._of = [model]  # in a list, so that it is not a part of this one
        self.config = model.config

    def forward(self, **given: Any) -> Any:
        (model,) = self._of
        with without_adapters(model):
            return model(**given, scores_alone=True)


class GridPreferenceTrainer(GridTrainer):
    """Comes before TRL's `DPOTrainer`; use `trainer` to make one.

    Without a ``ref_model`` the reference is the model as it was given; with ``peft_config``, the model without adapters. A reference on
    ``meta`` is read from the folder that its config is from.
    """

    known_losses = ("trl.trainer.dpo_trainer",)
    ref_model: Any

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        *,
        parallel: Any = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{name}(model={model!r}): pass a model; one on meta is read from the folder checkpoint="
            )
        if options.get("compute_metrics") is not None:
            raise UnsupportedError(f"{name}(compute_metrics=...): TRL passes it whole logits; leave it out")
        if getattr(args, "disable_dropout", False):  # TRL switches modules off, and adapters have none here
            options["peft_config"] = _without_dropout(options.get("peft_config"))
            for adapter, config in getattr(model, "peft_config", {}).items():
                cast(Any, model).peft_config[adapter] = _without_dropout(config)
            if (parallel or {}).get("lora") is not None:
                parallel = {**parallel, "lora": replace(parallel["lora"], dropout=0.0)}
        self._reference_checkpoint: str | Path | None = None
        if ref_model is not None:
            if any(p.is_meta for p in ref_model.parameters()):
                self._reference_checkpoint = _folder_of(ref_model)
        elif hasattr(model, "peft_config"):
            raise UnsupportedError(
                f"{name}(ref_model=None): the reference would be a copy of the adapters that the model has; merge them "
                "(merge_and_unload) and pass peft_config, or pass a ref_model"
            )
        elif options.get("peft_config") is not None or (parallel or {}).get("lora") is not None:
            ref_model = WithoutAdapters(model)
        else:
            ref_model, self._reference_checkpoint = copy.deepcopy(model), options.get("checkpoint")
        self._reference = ref_model
        self._computes_loss = False
        super().__init__(model, args, ref_model=ref_model, parallel=parallel, **options)
        doors = functools.partial(
            answer_with_scores, grid=self.grid, needs_scores=lambda: self._computes_loss
        )
        doors(self.model, has_metrics=True)
        if isinstance(ref_model, WithoutAdapters):
            del ref_model.forward  # TRL's, which computes log-probabilities from the head's weight
        else:
            doors(self.ref_model, has_metrics=False)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if isinstance(self._reference, WithoutAdapters):
            return
        options = {name: value for name, value in self._options.items() if name not in _OF_TRAINING}
        parallelize(
            self._reference.requires_grad_(False),
            self.grid,
            **options,
            checkpoint=self._reference_checkpoint,
        )

    # -- a step ---------------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the pairs of the global batch: of the means of ranks, which have as many each."""
        if return_outputs:
            raise UnsupportedError("return_outputs=True asks for whole logits; use prediction_loss_only=True")
        self._computes_loss = True
        try:
            loss = super(GridTrainer, self).compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)  # type: ignore[misc]
        finally:
            self._computes_loss = False
        for axis in _PARTS:
            loss = sum_forward(loss / self.grid.size(axis), self.grid.collectives, axis, "loss")
        return loss

    def _leave_out_repeated(self, inputs: Any, rows: int) -> bool:
        """A mean over pairs has no labels that could be left out."""
        every = rows * self.grid.batch_ranks
        if self.grid.batch_ranks > 1 and not self.args.dataloader_drop_last:
            last = self.accelerator.last_batch(rows)
            if last != every:
                raise UnsupportedError(
                    f"the last batch has {last} pairs for data*z={self.grid.batch_ranks} parts of {rows}; use "
                    f"dataloader_drop_last=True, or a data set whose length is a multiple of {every}"
                )
        return False

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        if not prediction_loss_only:
            raise UnsupportedError(
                "prediction_loss_only=False: predictions of DPOTrainer are whole logits; use True"
            )
        self._leave_out_repeated(inputs, self.args.eval_batch_size)
        return cast(
            "tuple[Any, Any, Any]",
            super(GridTrainer, self).prediction_step(model, inputs, True, ignore_keys),  # type: ignore[misc]
        )


# Options of `parallelize` that a model without backward has no use for, or that are those of the trained one.
_OF_TRAINING = (
    "lora",
    "checkpoint",
    "activation_checkpointing",
    "checkpointed_blocks",
    "activation_offloading",
)


def _folder_of(model: Any) -> Path:
    folder = Path(model.config.name_or_path or "-")
    if not folder.is_dir():
        raise ValueError(
            f"ref_model is on meta, and its config is from {str(folder)!r}, which is not a folder; load its config from the folder of its "
            "weights, or pass a model with weights"
        )
    return folder


def _without_dropout(config: Any) -> Any:
    if config is None or not getattr(config, "lora_dropout", 0):
        return config
    config = copy.copy(config)
    config.lora_dropout = 0.0
    return config
