"""Autograd has no order among the gradients of one node: ranks that get them in different orders reduce the same ones together."""

import pytest

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.weights.streamed import StreamedWeights
from fourfold.weights.streamed_weight import StreamedWeight
from tests.models import assert_shards_close, batch, build, gradients, local_gradients

GATE, UP = "gate_proj.weight", "up_proj.weight"


def train(bundle_bytes: int) -> list[str]:
    """A forward and backward on z ranks, of which the second gets the gradients of gate and up the other way round."""
    grid, arrived, held = Grid.create((1, 2, 1, 1)), [], []
    arrive = StreamedWeights._arrive

    def swapped(self: StreamedWeights, weight: StreamedWeight) -> None:
        if not weight.name.endswith((GATE, UP)):
            arrive(self, weight)
            return
        held.append(weight)
        if len(held) == 2:
            for each in sorted(held, key=lambda w: w.name, reverse=grid.coordinate("z") == 1):
                arrived.append(each.name.rpartition(".mlp.")[2])
                arrive(self, each)
            held.clear()

    model, stock = build("llama"), build("llama")
    ids, labels = batch(4)
    stock(input_ids=ids, labels=labels).loss.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedWeights, "_arrive", swapped)
        overlap = ff.Overlap(bundle_bytes=bundle_bytes)
        report = ff.parallelize(model, grid, weights="streamed", overlap=overlap)
        rows = grid.local_rows(4)
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    return arrived[:2]


@pytest.mark.parametrize("bundle_bytes", [0, 1 << 20])
def test_gradients_that_arrive_in_another_order_on_each_rank(pool: RankPool, bundle_bytes: int) -> None:
    assert pool.run(train, 2, bundle_bytes) == [[GATE, UP], [UP, GATE]]
