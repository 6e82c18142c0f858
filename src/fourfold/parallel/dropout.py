"""Random numbers that follow the layout: equal where activations are replicated, independent where they are cut.

Between two linears activations are cut over one tensor axis and replicated over the other, or cut over both. All x and
y ranks of a batch part share one default generator, which stays in step. A layer that cuts its output over an axis draws
a seed from it, the same on all of them, and mixes in the rank's place on that axis: until the next layer is entered,
dropout of any kind (a module, a function, inside attention) draws from there. Nothing is kept but the shared state, so a
recomputed forward, whose shared state the checkpoint restores, draws the same masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring inputs give distant seeds
_STEP_MIX = 0xD1B54A32D192ED03  # another odd number, so that steps and seeds do not meet


class Dropout:
    """Keeps the default generator in the state that the layout of the activations asks for."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._shared: Tensor | None = None

    def enter(self, *axes: Axis | None) -> None:
        """Activations are cut over these axes from here on."""
        self.leave()
        cut = {axis for axis in axes if axis is not None and self._grid.size(axis) > 1}
        if not cut:
            return
        seed = self._draw()
        self._shared = self._generator().get_state()
        x, y = self._grid.coordinate("x"), self._grid.coordinate("y")
        # A number of its own for each place: on x, on y, on both.
        if len(cut) == 2:
            place = 1 + self._grid.x + self._grid.y + y * self._grid.x + x
        else:
            place = 1 + (x if "x" in cut else self._grid.x + y)
        self._generator().manual_seed((seed * _MIX + place * 0x2545F4914F6CDD1D) % 2**63)

    def leave(self) -> None:
        """Back to what all x and y ranks share."""
        if self._shared is not None:
            self._generator().set_state(self._shared)
            self._shared = None

    def forget(self) -> None:
        """The shared state was restored by somebody else: a checkpoint, at the start of a recomputed forward."""
        self._shared = None

    def _generator(self) -> torch.Generator:
        device = self._grid.device
        return (
            torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        )

    def _draw(self) -> int:
        generator = self._generator()
        if generator.device.type == "cpu":
            with torch._C._DisableTorchDispatch():  # a number, also where tensors are fake
                return int(torch.randint(2**62, (), generator=generator))
        # A CUDA generator is a seed and an offset on the host: reading them does not wait for the device.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        return generator.initial_seed() * _MIX + offset


def seed_ranks(grid: Grid, seed: int, step: int = 0, *, replica: int = 0) -> None:
    """Seed the default generators: the same on the x and y ranks of a batch part, another for each part and step.

    Called before each step, a run that is resumed draws what it would have drawn, and no generator has to be saved.
    ``replica``: which one this grid is, if there are others beside it.
    """
    part = replica * grid.batch_ranks + grid.batch_rank
    torch.manual_seed((seed * _MIX + step * _STEP_MIX + part) % 2**63)


def uses_dropout(model: nn.Module) -> bool:
    """A dropout module, or any module or config that holds a rate; a constant in a function's call is not seen."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    holders = [vars(m) for m in model.modules()]
    if hasattr(config, "to_dict"):
        values = config.to_dict()
        holders += [values, *(part for part in values.values() if isinstance(part, dict))]
    return any(
        "drop" in str(key) and isinstance(value, float) and value > 0
        for holder in holders
        for key, value in holder.items()
    )
