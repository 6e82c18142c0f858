"""The order of samples: stateless, the same on every grid and after every restart, each sample once per epoch."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import Grid, factorisations
from fourfold.data.loader import Loader
from fourfold.data.mixture import Mixture, check_identity
from fourfold.data.order import MAX_PERIOD, Order, interleave, permuted, shares
from fourfold.data.samples import Sample

Shape = tuple[int, int, int, int]


# -- a permutation without a table ----------------------------------------------------------------------------------


@settings(deadline=None)  # of one example: a busy machine would not keep it
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permuted_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(2**33, 2**50), first=st.integers(0, 2**32), key=st.integers(0, 2**64 - 1))
def test_no_position_of_a_trillion_repeats(size: int, first: int, key: int) -> None:
    taken = permuted(np.arange(first, first + 2000), size, key)
    assert len(set(taken.tolist())) == 2000
    assert taken.min() >= 0
    assert taken.max() < size
    # Spread over all of it: the chance that 2000 fair draws miss a tenth is 1e-91.
    assert len(set((taken * 10 // size).tolist())) == 10


def test_every_order_of_four_is_equally_frequent() -> None:
    """24 orders of 4 samples over 3,000 epochs: chi-square with 23 degrees of freedom exceeds 60 once in 30,000."""
    epochs = 3_000
    _, samples = Order(seed=0, sizes=(4,), weights=(1.0,)).at(np.arange(4 * epochs))
    _, counts = np.unique(samples.reshape(epochs, 4), axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - epochs / 24) ** 2 / (epochs / 24)).sum() < 60


# -- whose turn it is -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=7))
def test_every_prefix_has_its_share_of_each_source_within_one(counts: list[int]) -> None:
    turns = interleave(counts)
    period, k = len(turns.source), len(counts)
    had = np.cumsum(turns.source[:, None] == np.arange(k), axis=0)
    wanted = np.arange(1, period + 1)[:, None] * (np.array(counts) / sum(counts))
    bound = 1 - 1 / (2 * k - 2) if k > 1 else 0
    assert np.abs(had - wanted).max() <= bound + 1e-9
    assert (had[-1] * sum(counts) == period * np.array(counts)).all()


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=9))
def test_shares_are_the_weights_to_one_sample_of_a_period(weights: list[float]) -> None:
    counts = shares(weights)
    assert sum(counts) <= MAX_PERIOD
    assert min(counts) >= 1
    wanted = np.array(weights) / sum(weights)
    assert np.abs(np.array(counts) / sum(counts) - wanted).max() <= len(weights) / MAX_PERIOD


def test_weights_with_few_decimals_are_exact() -> None:
    assert shares([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert shares([3, 1.5]) == (2, 1)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_weight_is_rejected(weight: float) -> None:
    with pytest.raises(ValueError, match="source 1 has the weight"):
        shares([1.0, weight])


# -- the law of the whole: grids, batch sizes and interruptions change nothing ----------------------------------------


class Named:
    """A source whose samples contain their own index."""

    def __init__(self, number: int, size: int) -> None:
        self._number, self._size = number, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self._size
        return Sample(*(np.array([self._number, index]) for _ in range(3)))


@dataclass(frozen=True)
class Place:
    """A mesh that only knows the coordinates of a rank."""

    shape: Shape
    rank: int

    def get_coordinate(self) -> list[int]:
        return [int(place) for place in np.unravel_index(self.rank, self.shape)]


def grid_of(shape: Shape, rank: int) -> Grid:
    return Grid(*shape, Place(shape, rank), torch.device("cpu"), None, "cpu")  # type: ignore[arg-type]


def mixture_of(seed: int, sizes: tuple[int, ...], weights: tuple[float, ...]) -> Mixture:
    sources = tuple(Named(number, size) for number, size in enumerate(sizes))
    return Mixture(sources, Order(seed, sizes, weights), {"seed": seed})


def ids(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return [(int(source), int(sample)) for source, sample in tensor]


@st.composite
def legs(draw: st.DrawFn) -> list[tuple[Shape, int, int]]:
    """(grid, sequences of a step, steps until the interruption), four times or more."""
    found = []
    for _ in range(draw(st.integers(4, 6))):
        shape = draw(st.sampled_from(factorisations(draw(st.integers(1, 16)))))
        batch = shape[0] * shape[1] * draw(st.integers(1, 4))
        found.append((shape, batch, draw(st.integers(0, 4))))
    return found


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    sizes = tuple(draw(st.lists(st.integers(1, 50), min_size=1, max_size=3)))
    weights = tuple(draw(st.sampled_from([0.3, 0.7, 1.0, 2.0, 3.14159])) for _ in sizes)
    return mixture_of(draw(st.integers(0, 2**63 - 1)), sizes, weights)


def check_order(mixture: Mixture, runs: list[tuple[Shape, int, int]], prefetch_batches: int) -> None:
    """Grids, batches and interruptions do not change it."""
    seen: list[tuple[int, int]] = []
    count = 0  # all that a checkpoint holds
    for shape, batch, steps in runs:
        replicas: dict[int, list[list[tuple[int, int]]]] = {}
        for rank in range(int(np.prod(shape))):
            grid = grid_of(shape, rank)
            batches = Loader(mixture, grid, batch, prefetch_batches=prefetch_batches).batches(count)
            rows = [ids(next(batches).inputs["input_ids"]) for _ in range(steps)]
            batches.close()  # type: ignore[attr-defined]
            # x and y ranks of a replica read the same.
            assert replicas.setdefault(grid.batch_rank, rows) == rows
        for step in range(steps):
            seen += [row for number in sorted(replicas) for row in replicas[number][step]]
        count += steps * batch

    whole = Loader(mixture, grid_of((1, 1, 1, 1), 0), max(1, count), prefetch_batches=0).read(0)
    assert seen == ids(whole.inputs["input_ids"])[:count]
    for source, size in enumerate(mixture.order.sizes):
        mine = [sample for s, sample in seen if s == source]
        for first, stop in pairwise(range(0, len(mine) + 1, size)):
            assert sorted(mine[first:stop]) == list(range(size))


RUNS = (mixtures(), legs(), st.sampled_from([0, 2]))


@settings(max_examples=20)
@given(*RUNS)
def test_grids_batches_and_interruptions_do_not_change_the_order(
    mixture: Mixture, runs: list[tuple[Shape, int, int]], prefetch_batches: int
) -> None:
    check_order(mixture, runs, prefetch_batches)


@pytest.mark.nightly
@settings(max_examples=200)
@given(*RUNS)
def test_the_order_of_many_runs(
    mixture: Mixture, runs: list[tuple[Shape, int, int]], prefetch_batches: int
) -> None:
    check_order(mixture, runs, prefetch_batches)


def test_the_count_after_a_step_is_the_first_of_the_next() -> None:
    batches = Loader(mixture_of(0, (100,), (1.0,)), grid_of((2, 1, 1, 1), 1), 6).batches(12)
    first, second = next(batches), next(batches)
    assert (first.first_sample, first.next_sample) == (12, 18)
    assert second.first_sample == 18


def test_the_order_changes_with_seed_and_epoch() -> None:
    orders = [Order(seed, (1000,), (1.0,)).at(np.arange(2000))[1] for seed in (0, 1)]
    for first, second in [(orders[0][:1000], orders[1][:1000]), (orders[0][:1000], orders[0][1000:])]:
        assert (first == second).mean() < 0.01


def test_two_sources_of_the_same_size_have_different_orders() -> None:
    sources, samples = Order(0, (1000, 1000), (1.0, 1.0)).at(np.arange(2000))
    assert (samples[sources == 0] == samples[sources == 1]).mean() < 0.01


def test_an_error_of_the_reader_thread_reaches_the_caller() -> None:
    class Broken(Named):
        def __getitem__(self, index: int) -> Sample:
            raise OSError("the disk is gone")

    mixture = Mixture((Broken(0, 9),), Order(0, (9,), (1.0,)), {})
    with pytest.raises(OSError, match="disk is gone"):
        next(Loader(mixture, grid_of((1, 1, 1, 1), 0), 2).batches())


def test_a_stream_that_differs_from_the_checkpoint_is_rejected() -> None:
    check_identity({"seed": 1}, {"seed": 1})
    with pytest.raises(ValueError, match=r"seed=1, this run has seed=2.*old value"):
        check_identity({"seed": 1}, {"seed": 2})
