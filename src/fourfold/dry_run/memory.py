"""Memory by category: who holds how many bytes in a step, and where that is most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Category = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered weights",
    "communication buffers",
    "logits",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True)
class Peak:
    """The most memory that tensors take in a step."""

    bytes: float
    by_category: Mapping[Category, float]
    event: int  # while this one runs


def find_peak(before: Mapping[Category, float], changes: Sequence[Sequence[tuple[Category, float]]]) -> Peak:
    """The highest sum on the way through a step that begins with ``before``."""
    now = {category: float(before.get(category, 0)) for category in CATEGORIES}
    total = sum(now.values())
    best = Peak(total, dict(now), 0)
    for event, of_event in enumerate(changes):
        for category, size in of_event:
            now[category] += size
            total += size
            if total > best.bytes:
                best = Peak(total, dict(now), event)
    return best
