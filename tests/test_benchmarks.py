"""Small versions of the benchmarks: what they promise holds, and a planted fault makes them fail."""

import pytest

from benchmarks import families, memory, parity, traffic
from fourfold.selftest import KINDS, Errors, grids_of


def worst(pool, ranks, shape, kind, fault=None) -> Errors:
    return Errors.worst(pool.run(parity.run_rank, ranks, shape, kind, fault))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2, 2, 2), (2, 1, 1, 4)])
def test_a_grid_trains_like_one_process(pool, kind, shape):
    assert worst(pool, 8, shape, kind).within_bars()


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 8, 1), (1, 8, 1, 1), (8, 1, 1, 1)])
def test_each_axis_alone_trains_like_one_process(pool, shape):
    assert worst(pool, 8, shape, "llama").within_bars()


def test_sixteen_ranks_train_like_one_process(pool):
    assert worst(pool, 16, (2, 2, 2, 2), "gpt2").within_bars()


@pytest.mark.parametrize("fault", parity.FAULTS)
def test_a_planted_fault_is_found(pool, fault):
    assert not worst(pool, 8, (1, 2, 2, 2), "llama", fault).within_bars()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("olmo2", "verified"),
        ("phi3", "verified"),
        ("bloom", "verified"),
        ("minicpm3", "verified"),
        ("qwen2_vl", "verified"),
        ("mixtral", "refused"),
        ("qwen3_5", "refused"),
    ],
)
def test_a_family_is_exact_or_refused(pool, name, status):
    assert families.check(pool, families.find_family(name)).status == status


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("weights", ["fsdp2", "streamed"])
@pytest.mark.parametrize("shape", traffic.GRIDS)
def test_each_rank_sends_the_bytes_of_the_formulas(pool, kind, shape, weights):
    for forward, backward in pool.run(traffic.count_rank, 8, kind, shape, weights):
        assert traffic.check(kind, shape, weights, forward, backward) == []


def test_bytes_that_are_not_in_the_formulas_are_noticed(pool):
    forward, backward = pool.run(traffic.count_rank, 8, "llama", (1, 2, 2, 2), "fsdp2")[0]
    assert traffic.check("llama", (1, 2, 2, 2), "fsdp2", forward, backward[1:]) != []


@pytest.mark.limit(300)
def test_loading_holds_no_more_than_a_ranks_own_part():
    assert memory.main([]) == 0


def test_the_self_test_cuts_every_axis():
    for ranks in (1, 2, 3, 4, 6, 8, 12, 64, 512):
        shapes = grids_of(ranks)
        assert shapes
        assert all(d * z * y * x == ranks for d, z, y, x in shapes)
    assert {axis for shape in grids_of(8) for axis in range(4) if shape[axis] > 1} == {0, 1, 2, 3}
