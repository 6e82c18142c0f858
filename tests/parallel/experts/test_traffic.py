"""Experts send what the formulas say, to the byte; the rest of the model is a Llama without its MLP (`benchmarks/experts/sent.py`)."""

import pytest

from benchmarks.experts import sent
from benchmarks.experts.ways import Shape, Way
from benchmarks.ranks import RankPool
from fourfold.parallel.experts.choice import Experts
from fourfold.parallel.options import Activations

Z_X = ("z", "x")


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
@pytest.mark.parametrize(
    ("shape", "experts"),
    [
        ((1, 2, 2, 2), "cut"),
        ((1, 2, 2, 2), Z_X),
        *(
            pytest.param(shape, experts, marks=pytest.mark.nightly)
            for shape, experts in (
                ((2, 1, 2, 2), "cut"),
                ((1, 1, 2, 4), "cut"),
                ((1, 2, 2, 2), ("z",)),
                ((2, 1, 2, 2), ("x",)),
                ((2, 2, 1, 2), Z_X),
            )
        ),
    ],
)
def test_experts_send_what_the_formulas_say(
    pool: RankPool, shape: Shape, experts: Experts, activations: Activations
) -> None:
    way = Way(shape, experts, "fsdp2", activations)
    accounts = pool.run(sent.account, 8, way)
    assert [each.sent for each in accounts] == sent.formulas(way, accounts)
    assert any(len(own.chosen) for own in accounts)


def test_what_is_sent_twice_is_found(pool: RankPool) -> None:
    way = Way((1, 2, 2, 2), Z_X, "fsdp2")
    accounts = pool.run(sent.account, 8, way, "traffic")
    assert [each.sent for each in accounts] != sent.formulas(way, accounts)
