"""What a trainer logged and wrote, and how far two of them are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

BAR = 1e-5
Shape = tuple[int, int, int, int]


_COMPARED = ("loss", "grad_norm", "learning_rate", "top1", "rows")
# Rewards are differences of log-probabilities of tens, so have digits of those: their errors are relative to 1, at which a sigmoid takes them.
_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
# Means of values of both signs: their errors are relative to the largest of a run.
_MEAN_LOGITS = ("logits/chosen", "logits/rejected")
_OF_PREFERENCES = (
    *_REWARDS,
    *_MEAN_LOGITS,
    *("logps/chosen", "logps/rejected", "entropy", "mean_token_accuracy"),
)


class Outcome(NamedTuple):
    """What a trainer logged, by name, and the weights that it wrote."""

    logs: dict[str, list[float]]
    weights: dict[str, Tensor]


def outcome(trainer: Any, folder: Path) -> Outcome:
    from safetensors.torch import load_file

    logs: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        names = _COMPARED + (_OF_PREFERENCES if "preferences" in str(trainer.args.run_name) else ())
        for name in names:
            for key in (name, f"eval_{name}"):
                if key in entry:
                    logs.setdefault(key, []).append(float(entry[key]))
    trainer.save_model(str(folder))
    (file,) = folder.glob("*.safetensors")  # of a model, or of adapters
    return Outcome(logs, load_file(file))


def worst_error(found: Outcome, stock: Outcome) -> tuple[float, float]:
    """(of what was logged, of the weights); infinite where something is missing."""
    if {n: len(v) for n, v in found.logs.items()} != {n: len(v) for n, v in stock.logs.items()}:
        return float("inf"), float("inf")
    logged = max(
        abs(a - b) / _scale(name, b, values)
        for name, values in stock.logs.items()
        for a, b in zip(found.logs[name], values, strict=True)
    )
    if set(found.weights) != set(stock.weights):
        return logged, float("inf")
    weights = (
        float((found.weights[n] - w).abs().max() / w.abs().max().clamp(min=1e-12))
        for n, w in stock.weights.items()
    )
    return logged, max(weights)


def _scale(name: str, value: float, values: list[float]) -> float:
    """What an error is relative to."""
    kind = name.removeprefix("eval_")
    if kind in _REWARDS:
        return max(1.0, abs(value))
    return max(1e-12, *map(abs, values if kind in _MEAN_LOGITS else [value]))


def ranks_of(shape: Shape) -> int:
    data, z, y, x = shape
    return data * z * y * x
