"""Clipping: the same bits of the norm on all ranks."""

from typing import Any

import torch
from torch import Tensor

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh.collectives import Collectives, Pending
from tests.models import batch, build


def norm_with_an_ulp(shape: tuple[int, int, int, int]) -> tuple[float, float]:
    """The norm, where the sum over x is an ulp larger on one rank, as another order of adding may make it; and the sum."""
    grid = Grid.create(shape)
    model = build("llama")
    ff.parallelize(model, grid)
    ids = batch(4, 8)[0]
    ids = ids[grid.local_rows(len(ids))]
    model(input_ids=ids, labels=ids).loss.backward()
    real, sums = Collectives.all_reduce, []

    def all_reduce(
        self: Collectives, tensor: Tensor, axis: Any, purpose: Any, *rest: Any, **more: Any
    ) -> Pending:
        pending = real(self, tensor, axis, purpose, *rest, **more)
        if purpose == "clip" and not rest and axis == "z":
            pending.wait()
            if grid.coordinate("x") == 1:
                tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, torch.inf)))
            sums.append(float(tensor.sqrt()))
        return pending

    Collectives.all_reduce = all_reduce  # type: ignore[method-assign]
    try:
        norm = ff.clip_grad_norm_(model.parameters(), 1.0, grid)
    finally:
        Collectives.all_reduce = real  # type: ignore[method-assign]
    return float(norm), sums[0]


def test_all_ranks_have_the_same_bits_of_the_norm(pool: RankPool) -> None:
    norms, sums = zip(*pool.run(norm_with_an_ulp, 4, (1, 2, 1, 2)), strict=True)
    assert len(set(sums)) == 2
    assert set(norms) == {max(sums)}
