"""Measurements of a cluster: collectives by size, matmuls by shape, and the slowdown of both at once.

`fourfold calibrate` writes these into a cluster's file, in `[measured]`. A measurement takes precedence over any
formula. Spreads are interquartile ranges over repetitions.
"""

from __future__ import annotations

import bisect
import difflib
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any


def spread(values: Sequence[float]) -> float:
    """The range between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True)
class CollectiveTimes:
    """One kind of collective over one position of an axis, all groups of that position at once."""

    kind: str
    ranks: int
    inner_ranks: int
    payload_bytes: tuple[float, ...]  # in rising order
    seconds: tuple[float, ...]
    spread_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.payload_bytes or len(self.payload_bytes) != len(self.seconds):
            raise ValueError(
                f"{self.kind} over {self.ranks} ranks, {self.inner_ranks} apart, has {len(self.payload_bytes)} sizes and "
                f"{len(self.seconds)} times; give one time for each size, and at least one"
            )
        if sorted(set(self.payload_bytes)) != list(self.payload_bytes):
            raise ValueError(
                f"the sizes of {self.kind} over {self.ranks} ranks, {self.inner_ranks} apart, do not rise: {self.payload_bytes}"
            )

    def at(self, payload_bytes: float) -> float:
        """Seconds of any size: between two that were measured on the line through them, beyond on the last line.

        Example:
            >>> CollectiveTimes("all_reduce", 2, 1, (0.0, 100.0, 200.0), (1.0, 2.0, 4.0)).at(250.0)
            5.0
        """
        sizes, seconds = self.payload_bytes, self.seconds
        if payload_bytes <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        right = min(bisect.bisect_left(sizes, payload_bytes), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return max(0.0, seconds[left] + slope * (payload_bytes - sizes[left]))


@dataclass(frozen=True)
class Together:
    """Slowdown of computation and of communication while the ranks of a position do both at once."""

    ranks: int
    inner_ranks: int
    compute: float
    communication: float


@dataclass(frozen=True)
class MatmulTime:
    m: int
    n: int
    k: int
    seconds: float
    spread_s: float = 0.0

    @property
    def flops_per_s(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Measured:
    """Everything that was measured; empty for a cluster that was not."""

    collectives: tuple[CollectiveTimes, ...] = ()
    together: tuple[Together, ...] = ()
    matmuls: tuple[MatmulTime, ...] = ()
    attention_forward_tflops: float | None = None
    attention_backward_tflops: float | None = None

    def collective(self, kind: str, ranks: int, inner_ranks: int) -> CollectiveTimes | None:
        where = (kind, ranks, inner_ranks)
        return next((t for t in self.collectives if (t.kind, t.ranks, t.inner_ranks) == where), None)

    def slowdown(self, ranks: int, inner_ranks: int) -> Together | None:
        where = (ranks, inner_ranks)
        return next((t for t in self.together if (t.ranks, t.inner_ranks) == where), None)

    def matmul_flops_per_s(self, m: float, n: float, k: float) -> float | None:
        """The rate of the nearest measured shapes, weighted by nearness.

        Shapes are as near as their sides' ratios are to one.
        """
        if not self.matmuls:
            return None
        near = sorted(
            (
                math.log2(m / t.m) ** 2 + math.log2(n / t.n) ** 2 + math.log2(k / t.k) ** 2,
                math.log(t.flops_per_s),
            )
            for t in self.matmuls
        )[:_NEAREST]
        if near[0][0] == 0:
            return math.exp(near[0][1])
        weights = [1 / distance for distance, _ in near]
        mean = sum(w * log_rate for w, (_, log_rate) in zip(weights, near, strict=True)) / sum(weights)
        return math.exp(mean)


_NEAREST = 4
_ROWS: dict[str, type] = {"collectives": CollectiveTimes, "together": Together, "matmuls": MatmulTime}


def from_tables(values: dict[str, Any]) -> Measured:
    """From what a TOML file says under `[measured]`."""
    advice = " If an older version wrote it, run fourfold calibrate again"
    check_keys("[measured]", values, [f.name for f in fields(Measured)], advice)
    given = dict(values)
    for key, kind in _ROWS.items():
        rows = given.get(key, ())
        for row in rows:
            check_keys(f"[[measured.{key}]]", row, [f.name for f in fields(kind)])
        given[key] = tuple(kind(**{k: as_tuples(v) for k, v in row.items()}) for row in rows)
    return Measured(**given)


def as_tuples(value: Any) -> Any:
    """A value of a TOML file with tuples for its lists."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def check_keys(where: str, given: Iterable[str], known: list[str], advice: str = "") -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, cutoff=0.0)[0]
            raise ValueError(
                f"{where} has {key!r}, which is not one of its {len(known)} keys; did you mean {near!r}?{advice}"
            )
