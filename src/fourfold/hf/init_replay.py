"""Replays the initialisation of a parameter for any slice of it: the same values however it is sharded."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.hf.parameter_layout import checked_bounds

RANDOM = frozenset(("normal_", "uniform_", "trunc_normal_"))
OVERWRITES = RANDOM | {"fill_", "zero_", "copy_"}

# Large enough that seeding a generator (tens of microseconds) is small against drawing (0.4 ms), small enough
# that a rank that needs a corner of a tile wastes little.
TILE_ELEMENTS = 2**16
TILE_SIDE = 256


@dataclass(frozen=True)
class Step:
    """One in-place operation on a parameter, or on the rows `rows = (start, stop)` of its dim 0.

    `op` is a method of tensors, or trunc_normal_ of `nn.init`, with these arguments. A copy_ has `values` instead.
    """

    op: str
    arguments: tuple[float | None, ...] = ()
    rows: tuple[int, int] | None = None
    values: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class InitReplay:
    """The steps that initialise a parameter of this full shape."""

    shape: tuple[int, ...]
    steps: tuple[Step, ...]


@torch.no_grad()
def fill_(out: Tensor, replay: InitReplay, index: tuple[slice, ...], *, name: str, seed: int) -> None:
    """Fill `out` with the slice `index` of the initial value of parameter `name`.

    The value at a position is a function of (seed, name, position) alone: the parameter is split into tiles by its full
    shape, each tile has its own random stream, and the part of a tile within the slice is copied. Values are drawn on
    the CPU in fp32, so they are the same for every device and dtype of `out`, up to the final cast.
    """
    shape = replay.shape
    bounds = checked_bounds(index, shape, out, name)
    if out.numel() == 0:
        return

    sides = _tile_shape(shape)
    generator = torch.Generator()
    for tile_index in itertools.product(
        *(range(lo // side, -(-hi // side)) for (lo, hi), side in zip(bounds, sides, strict=True))
    ):
        corner = [c * side for c, side in zip(tile_index, sides, strict=True)]
        tile = torch.empty([min(side, n - c) for c, side, n in zip(corner, sides, shape, strict=True)])
        for number, step in enumerate(replay.steps):
            _replay(step, tile, corner, generator, f"{seed} {number} {tile_index} {name}")
        here, there = [], []
        for (lo, hi), start, side in zip(bounds, corner, tile.shape, strict=True):
            first, last = max(lo, start), min(hi, start + side)
            here.append(slice(first - start, last - start))
            there.append(slice(first - lo, last - lo))
        out[tuple(there)].copy_(tile[tuple(here)])


def _tile_shape(shape: tuple[int, ...]) -> list[int]:
    """Squares of the last two dims, extended over the other dims where the squares would be small."""
    if not shape:
        return []
    rows = shape[-2] if len(shape) > 1 else 1
    sides = [max(1, min(shape[-1], max(TILE_SIDE, TILE_ELEMENTS // max(rows, 1))))]
    for n in reversed(shape[:-1]):
        sides.append(max(1, min(n, TILE_ELEMENTS // math.prod(sides))))
    return sides[::-1]


def _replay(step: Step, tile: Tensor, corner: list[int], generator: torch.Generator, stream: str) -> None:
    if step.rows is not None:
        start, stop = max(step.rows[0], corner[0]), min(step.rows[1], corner[0] + tile.shape[0])
        if start >= stop:
            return
        tile = tile[start - corner[0] : stop - corner[0]]
        corner = [start - step.rows[0], *corner[1:]]
    if step.values is not None:
        here = tuple(slice(c, c + side) for c, side in zip(corner, tile.shape, strict=True))
        tile.copy_(step.values[here])
        return
    operation: Any = getattr(tile, step.op, None) or partial(nn.init.trunc_normal_, tile)
    options = {}
    if step.op in RANDOM:
        # The CPU generator takes 32 bits of a seed, so among the six million tiles of a 405B model a few thousand
        # pairs hold the same values. Nothing depends on their being distinct.
        digest = hashlib.blake2b(stream.encode(), digest_size=4).digest()
        options["generator"] = generator.manual_seed(int.from_bytes(digest, "little"))
    operation(*step.arguments, **options)
