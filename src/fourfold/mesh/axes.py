"""The four axes of the grid, outermost first, and all grids with a given number of ranks. Does not import torch."""

from __future__ import annotations

import math
from typing import Literal

# Two are no axes of the mesh: "sequence" is a part of z, neighbours that share sequences (`Grid.sequence_ranks`), and "zx" are z and x
# together, z outside, of ranks that own experts over both (`join_z_and_x`).
Axis = Literal["data", "z", "y", "x", "sequence", "zx"]
AXES: tuple[Axis, ...] = ("data", "z", "y", "x")
SEQUENCE: Axis = "sequence"
Z_AND_X: Axis = "zx"


def axis_of_mesh(axis: Axis) -> Axis:
    """The axis of the mesh that its neighbours are on; of z and x together the outer one."""
    return "z" if axis in (SEQUENCE, Z_AND_X) else axis


def divisors(n: int) -> list[int]:
    """All divisors in rising order.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def factorisations(ranks: int) -> list[tuple[int, int, int, int]]:
    """All grids (data, z, y, x) with this number of ranks.

    Example:
        >>> len(factorisations(8))
        20
    """

    def split(n: int, axes: int) -> list[tuple[int, ...]]:
        if axes == 1:
            return [(n,)]
        return [(d, *rest) for d in divisors(n) for rest in split(n // d, axes - 1)]

    return [(f[0], f[1], f[2], f[3]) for f in split(ranks, 4)]
