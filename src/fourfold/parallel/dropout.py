"""Dropout masks that follow the layout: equal where activations are replicated, independent where they are sharded.

Between two linears activations are sharded over one tensor axis and replicated over the other, or sharded over both. All x
and y ranks with the same part of the batch keep the state of the default generator equal: the shared state. A layer whose
output is sharded over an axis draws a seed from it, the same on all these ranks, and mixes in the rank's coordinate on that
axis. Until the next layer starts, dropout of any kind (a module, a function, inside attention) draws from that seed. Only
the shared state is kept, so a recomputed forward, for which the checkpoint restores it, draws the same masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring inputs give distant seeds
_STEP_MIX = 0xD1B54A32D192ED03  # another odd number, so that (seed, step) pairs do not collide


class Dropout:
    """Keeps the default generator in the state that the layout of the activations requires."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._shared: Tensor | None = None

    def enter(self, *axes: Axis | None) -> None:
        """From here on activations are sharded over these axes."""
        self.leave()
        sharded = {axis for axis in axes if axis is not None and self._grid.size(axis) > 1}
        if not sharded:
            return
        seed = draw(self._grid.device)
        self._shared = _generator(self._grid.device).get_state()
        x, y = self._grid.coordinate("x"), self._grid.coordinate("y")
        # Distinct for each coordinate on x, on y, and on both.
        if len(sharded) == 2:
            stream = 1 + self._grid.x + self._grid.y + y * self._grid.x + x
        else:
            stream = 1 + (x if "x" in sharded else self._grid.x + y)
        _generator(self._grid.device).manual_seed((seed * _MIX + stream * 0x2545F4914F6CDD1D) % 2**63)

    def leave(self) -> None:
        """Return to the state that all x and y ranks share."""
        if self._shared is not None:
            _generator(self._grid.device).set_state(self._shared)
            self._shared = None

    def forget(self) -> None:
        """Drop the saved state: the checkpoint has restored it, at the start of a recomputed forward."""
        self._shared = None


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def draw(device: torch.device) -> int:
    """A number from the default generator of a device, the same on all ranks that share its state."""
    generator = _generator(device)
    if generator.device.type == "cpu":
        with torch._C._DisableTorchDispatch():  # a real number, even under fake tensors
            return int(torch.randint(2**62, (), generator=generator))
    # A CUDA generator has its seed and offset on the host, so reading them does not wait for the device.
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return generator.initial_seed() * _MIX + offset


def draw_for_shards(grid: Grid, axis: Axis | None) -> int:
    """A seed for activations that are sharded over an axis: the same on the ranks that have the same part, different for each part."""
    return (draw(grid.device) * _MIX + grid.coordinate(axis) * _STEP_MIX) % 2**63


def seed_ranks(grid: Grid, seed: int, step: int = 0, *, replica: int = 0) -> None:
    """Seed the default generators: equal on x and y ranks with the same part of the batch, different for each part and step.

    Called before each step, so that a resumed run draws the same values and no generator state has to be saved.
    ``replica`` is the index of this grid, if there are several.
    """
    part = replica * grid.token_ranks + grid.token_rank
    torch.manual_seed((seed * _MIX + step * _STEP_MIX + part) % 2**63)


def uses_dropout(model: nn.Module) -> bool:
    """Has the model a dropout module, or a module or config with a dropout rate? A constant in its code is not found."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    holders = [vars(m) for m in model.modules()]
    if hasattr(config, "to_dict"):
        values = config.to_dict()
        holders += [values, *(part for part in values.values() if isinstance(part, dict))]
    return any(
        "drop" in str(key)
        and not str(key).startswith(("summary", "classifier"))  # of heads that a language model does not have
        and isinstance(value, float)
        and value > 0
        for holder in holders
        for key, value in holder.items()
    )
