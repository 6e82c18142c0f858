"""Which mixin puts a trainer on a grid."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from fourfold.integrations.hf.preference import GridPreferenceTrainer
from fourfold.integrations.hf.trainer import GridTrainer, loss_of


def trainer(kind: type[Trainer]) -> Any:
    """The same trainer, on a grid: ``trainer(SFTTrainer)(model=..., args=..., grid=(1, 4, 2, 8), ...)``.

    The model is a Hugging Face causal LM with fp32 weights; or it is built on ``meta``, and ``checkpoint`` names the folder of its weights. A run is resumed on
    another grid by ``train(resume_from_checkpoint=...)``.

    Example:
        >>> from transformers import Trainer
        >>> run = trainer(Trainer)(model=model, args=args, grid=grid, train_dataset=rows)  # doctest: +SKIP
        >>> run.train()  # doctest: +SKIP
    """
    if not issubclass(kind, Trainer):
        raise ValueError(f"{kind.__name__} is not a subclass of transformers.Trainer")
    mixins: tuple[type[GridTrainer], ...] = (GridTrainer, GridPreferenceTrainer)
    own = loss_of(kind).__module__
    mixin = next((m for m in mixins if own.startswith(m.known_losses)), GridTrainer)  # which refuses others
    return type(f"Grid{kind.__name__}", (mixin, kind), {"__doc__": kind.__doc__})
