"""The order of samples: a pure function of (seed, global sample index).

Nothing is drawn in advance and nothing is remembered, so any rank of any grid can ask for any sample at any time.
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

ROUNDS = 8  # of the Feistel network; 4 are enough for a permutation that looks random on large sets, not on tiny ones
MAX_PERIOD = 1 << 16  # turns after which the pattern of sources repeats, if the weights are no simple ratios


@dataclass(frozen=True)
class Order:
    """Which sample of which source comes when.

    ``sizes``: samples of each source in one epoch of it; ``weights``: how often its turn comes. Each source has epochs
    of its own: it is gone through completely, in a new permutation, before any of its samples comes again.

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
            raise ValueError(f"{len(self.sizes)} sources have {len(self.weights)} weights; give one to each")
        if min(self.sizes) < 1:
            raise ValueError(f"source {self.sizes.index(min(self.sizes))} has no sample; leave it away")

    def at(self, indices: Ints) -> tuple[Ints, Ints]:
        """(source, sample of that source) at each global sample index."""
        turns = self._turns
        period, turn = np.divmod(np.asarray(indices, dtype=np.int64), len(turns.source))
        sources = turns.source[turn]
        nth = period * turns.count[sources] + turns.before[turn]
        samples = np.empty_like(nth)
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            epochs, places = np.divmod(nth[mine], self.sizes[source])
            for epoch in np.unique(epochs):
                now = epochs == epoch
                key = _key(self.seed, int(source), int(epoch))
                samples[mine[now]] = permuted(places[now], self.sizes[source], key)
        return sources, samples

    @cached_property
    def _turns(self) -> Turns:
        return take_turns(shares(self.weights))


# -- whose turn it is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """One period of the pattern of sources."""

    source: Ints  # [period]
    before: Ints  # [period]: how many turns the same source has had before, in this period
    count: Ints  # [sources]: turns of each in a period


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights, with a sum of at most `MAX_PERIOD`.

    Ratios of decimals as people write them are met exactly; others to one part in 65,536 of all samples.

    Example:
        >>> shares([0.7, 0.3]), shares([1, 2.5])
        ((7, 3), (2, 5))
    """
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"source {number} has the weight {weight}; use a number above 0, or leave it away"
            )
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(f.denominator for f in exact))
    whole = [int(f * scale) for f in exact]
    common = math.gcd(*whole)
    if sum(whole) // common <= MAX_PERIOD:
        return tuple(n // common for n in whole)
    if len(weights) > MAX_PERIOD:
        raise ValueError(
            f"{len(weights)} sources are more than {MAX_PERIOD}; prepare several into one folder"
        )
    parts = [Fraction(n, sum(whole)) * (MAX_PERIOD - len(weights)) for n in whole]
    counts = [1 + int(part) for part in parts]  # at least one turn each
    by_remainder = sorted(range(len(parts)), key=lambda i: (int(parts[i]) - parts[i], i))
    for i in by_remainder[: MAX_PERIOD - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def take_turns(counts: Sequence[int]) -> Turns:
    """Spread the turns evenly: after any n of them, source i has had n * share_i, give or take less than one.

    R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of the sources whose claim is old
    enough, the one that has to be served soonest. It keeps every deviation within 1 - 1/(2k - 2) for k sources.
    """
    period, k = sum(counts), len(counts)
    if k == 1:
        return Turns(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
    slack = 2 * k - 2
    had = [0] * k
    source, before = np.empty(period, np.int64), np.empty(period, np.int64)
    for turn in range(period):
        claims = [(turn + 1) * n - h * period for n, h in zip(counts, had, strict=True)]  # in 1/period turns
        chosen = min(
            (i for i in range(k) if claims[i] * slack >= period),
            key=lambda i: (period * (slack - 1) - slack * claims[i]) / counts[i],
        )
        source[turn], before[turn] = chosen, had[chosen]
        had[chosen] += 1
    return Turns(source, before, np.array(counts, np.int64))


# -- a permutation without a table --------------------------------------------------------------------------------


def permuted(places: Ints, size: int, key: int) -> Ints:
    """Where each place of ``range(size)`` goes under the permutation that ``key`` names.

    A Feistel network permutes a power of four; what falls outside of the range is sent through again until it falls
    inside ("cycle walking", Black and Rogaway 2002), which takes fewer than four passes on average.

    Example:
        >>> sorted(permuted(np.arange(5), 5, key=7).tolist())
        [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(np.uint64(key) ^ np.arange(1, ROUNDS + 1, dtype=np.uint64))
    values = places.astype(np.uint64)
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
