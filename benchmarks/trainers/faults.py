"""Faults that the comparison has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# By name, the trainers that show them.
FAULTS = {
    "repeated-rows": ("Trainer",),
    "mask": ("SFTTrainer", "DPOTrainer"),
    "documents": ("SFTTrainer, packed",),
    "optimizer-state": ("Trainer",),
    "adapter-sum": ("Trainer, LoRA",),
    "reference": ("DPOTrainer, LoRA",),
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """A fault, for as long as it lasts."""
    from fourfold.checkpoint import state
    from fourfold.integrations.hf import preference
    from fourfold.integrations.hf.accelerator import GridAccelerator
    from fourfold.integrations.hf.trainer import GridTrainer
    from fourfold.parallel import linear

    saved = GridAccelerator.repeated_rows, state.optimizers.restore
    losses = {kind: kind.compute_loss for kind in (GridTrainer, preference.GridPreferenceTrainer)}
    read_weight, without_adapters = linear.read_weight, preference.without_adapters
    if fault == "repeated-rows":
        GridAccelerator.repeated_rows = lambda self, rows: slice(rows, rows)  # type: ignore[method-assign]
    elif fault == "mask":
        for kind in losses:
            _change_inputs(kind, labels=_by_one, completion_mask=_by_one)
    elif fault == "documents":
        _change_inputs(GridTrainer, position_ids=lambda ids: torch.arange(ids.shape[-1])[None])
    elif fault == "optimizer-state":
        state.optimizers.restore = lambda *a, **k: {}  # type: ignore[assignment]
    elif fault == "adapter-sum":

        def without_sums(module: Any, key: str, axes: Any = (), **options: Any) -> Tensor:
            return read_weight(module, key, () if key.startswith(linear.ADAPTER) else axes, **options)

        linear.read_weight = without_sums
    elif fault == "reference":
        preference.without_adapters = lambda model: torch.no_grad()  # type: ignore[assignment]
    try:
        yield
    finally:
        linear.read_weight, preference.without_adapters = read_weight, without_adapters
        GridAccelerator.repeated_rows, state.optimizers.restore = saved  # type: ignore[method-assign]
        for kind, compute_loss in losses.items():
            kind.compute_loss = compute_loss  # type: ignore[method-assign]


def _by_one(mask: Tensor) -> Tensor:
    return mask.roll(1, -1)


def _change_inputs(kind: Any, **changes: Callable[[Tensor], Tensor]) -> None:
    compute_loss = kind.compute_loss

    def changed(self: Any, model: Any, inputs: Any, *positional: Any, **options: Any) -> Any:
        inputs = {k: changes[k](v) if k in changes else v for k, v in inputs.items()}
        return compute_loss(self, model, inputs, *positional, **options)

    kind.compute_loss = changed
