"""Blocks that are alike need not be traced one by one: a shallow copy of the model is enough."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

_LONGEST_PERIOD = 8
# Blocks at either end of a step differ from those in the middle: the first weight has nothing to overlap with, and
# gradients of two blocks may be in flight. These are enough for a middle, counted in periods.
_PERIODS = 4


@dataclass(frozen=True)
class Repeated:
    """A list of blocks in which each is like the one ``period`` before it."""

    name: str
    length: int
    period: int

    @property
    def traced(self) -> int:
        """How many blocks show all that there is to see: this many, and with one period more."""
        return self.length % self.period + _PERIODS * self.period


def find_repeated(model: nn.Module) -> Repeated | None:
    """The longest list of like blocks, if it is longer than what has to be traced of it."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        kinds = [_kind_of(block) for block in module]
        for period in range(1, _LONGEST_PERIOD + 1):
            if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
                repeated = Repeated(name, len(kinds), period)
                if repeated.traced + period < len(kinds):
                    found.append(repeated)
                break
    return max(found, key=lambda repeated: repeated.length, default=None)


def shallow_copy(model: nn.Module, repeated: Repeated, blocks: int) -> nn.Module:
    """A copy of the model with only the first ``blocks`` of its like blocks."""
    whole = model.get_submodule(repeated.name)
    assert isinstance(whole, nn.ModuleList)
    with _replaced(model, repeated.name, whole[:blocks]):
        return copy.deepcopy(model)


@contextmanager
def _replaced(model: nn.Module, name: str, by: nn.Module) -> Iterator[None]:
    parent, _, key = name.rpartition(".")
    owner = model.get_submodule(parent)
    theirs = owner._modules[key]
    owner._modules[key] = by
    try:
        yield
    finally:
        owner._modules[key] = theirs


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    """What decides which operations a block does: its classes, the shapes of its parameters, its settings."""
    kind: list[Any] = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and key not in ("layer_idx", "layer_id")
        }
        shapes = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
        kind.append((name, type(module), sorted(settings.items(), key=str), sorted(shapes.items())))
    return tuple(map(str, kind))
