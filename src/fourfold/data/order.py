"""The order of samples: a pure function of (seed, global sample index).

No state is kept, so any rank of any grid can compute any position at any time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

ROUNDS = 8  # of the Feistel network; 4 look random on large sets, but not on tiny ones
# Samples after which the pattern of sources repeats, if the weights are not simple ratios.
MAX_PERIOD = 1 << 16


@dataclass(frozen=True)
class Order:
    """Maps a global sample index to a source and a sample of it.

    ``sizes``: samples of each source in one epoch; ``weights``: relative frequency of each source. Each source has its
    own epochs: all of its samples are visited, in a new permutation, before any is repeated.

    Example:
        >>> order = Order(seed=0, sizes=(4,), weights=(1.0,))
        >>> sources, samples = order.at(np.arange(8))
        >>> sorted(samples[:4]) == sorted(samples[4:]) == [0, 1, 2, 3]
        True
    """

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.weights) or not self.sizes:
            raise ValueError(f"{len(self.sizes)} sources have {len(self.weights)} weights; give one for each")
        if min(self.sizes) < 1:
            raise ValueError(f"source {self.sizes.index(min(self.sizes))} has no samples; leave it out")

    def at(self, indices: Ints) -> tuple[Ints, Ints]:
        """(source, sample of that source) at each global sample index."""
        pattern = self._pattern
        period, position = np.divmod(np.asarray(indices, dtype=np.int64), len(pattern.source))
        sources = pattern.source[position]
        nth = period * pattern.count[sources] + pattern.before[position]
        samples = np.empty_like(nth)
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            epochs, positions = np.divmod(nth[mine], self.sizes[source])
            for epoch in np.unique(epochs):
                now = epochs == epoch
                key = _key(self.seed, int(source), int(epoch))
                samples[mine[now]] = permuted(positions[now], self.sizes[source], key)
        return sources, samples

    @cached_property
    def _pattern(self) -> Pattern:
        return interleave(shares(self.weights))


# -- the pattern of sources ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """One period of the pattern of sources."""

    source: Ints  # [period]
    before: Ints  # [period]: earlier samples of the same source in this period
    count: Ints  # [sources]: samples of each in a period


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Integers in the ratio of the weights, with a sum of at most `MAX_PERIOD`.

    Ratios of short decimals are exact; others are within one part in 65,536 of all samples.

    Example:
        >>> shares([0.7, 0.3]), shares([1, 2.5])
        ((7, 3), (2, 5))
    """
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"source {number} has the weight {weight}; use a number above 0, or leave it out"
            )
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(f.denominator for f in exact))
    integers = [int(f * scale) for f in exact]
    common = math.gcd(*integers)
    if sum(integers) // common <= MAX_PERIOD:
        return tuple(n // common for n in integers)
    if len(weights) > MAX_PERIOD:
        raise ValueError(
            f"{len(weights)} sources are more than {MAX_PERIOD}; prepare several into one folder"
        )
    parts = [Fraction(n, sum(integers)) * (MAX_PERIOD - len(weights)) for n in integers]
    counts = [1 + int(part) for part in parts]  # at least one each
    by_remainder = sorted(range(len(parts)), key=lambda i: (int(parts[i]) - parts[i], i))
    for i in by_remainder[: MAX_PERIOD - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def interleave(counts: Sequence[int]) -> Pattern:
    """Interleave the sources evenly: among the first n samples, source i has n * share_i, within less than one.

    R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): among the sources
    that are eligible, choose the one with the earliest deadline. Every deviation is within 1 - 1/(2k - 2) for k sources.
    """
    period, k = sum(counts), len(counts)
    slack = max(1, 2 * k - 2)
    had = [0] * k
    source, before = np.empty(period, np.int64), np.empty(period, np.int64)
    for position in range(period):
        # In units of 1/period.
        claims = [(position + 1) * n - h * period for n, h in zip(counts, had, strict=True)]
        chosen = min(
            (i for i in range(k) if claims[i] * slack >= period),
            key=lambda i: (period * (slack - 1) - slack * claims[i]) / counts[i],
        )
        source[position], before[position] = chosen, had[chosen]
        had[chosen] += 1
    return Pattern(source, before, np.array(counts, np.int64))


# -- a permutation without a table --------------------------------------------------------------------------------


def permuted(positions: Ints, size: int, key: int) -> Ints:
    """The image of each position in ``range(size)`` under the permutation given by ``key``.

    A Feistel network permutes a power of four; a value outside the range is permuted again until it is
    inside ("cycle walking", Black and Rogaway 2002), which takes fewer than four passes on average.

    Example:
        >>> sorted(permuted(np.arange(5), 5, key=7).tolist())
        [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(np.uint64(key) ^ np.arange(1, ROUNDS + 1, dtype=np.uint64))
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values[outside] = (left << half) | right
        outside = values >= size
    return values.astype(np.int64)


def _key(seed: int, source: int, epoch: int) -> int:
    word = np.zeros(1, np.uint64)
    for part in (seed, source, epoch):
        word = _mix(word ^ np.uint64(part & 0xFFFF_FFFF_FFFF_FFFF))
    return int(word[0])


def _mix(words: _Words) -> _Words:
    """SplitMix64 (Steele, Lea and Flood 2014), the same on every platform."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
