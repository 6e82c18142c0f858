"""Fused expert tensors over z: with more ranks than experts each rank still stores, gathers and reduces the same amount."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from benchmarks import reshard
from benchmarks.ranks import RankPool
from benchmarks.reshard import Shape
from fourfold import Grid
from tests.models import assert_shards_close, batch, build, gradients, local_gradients
from tests.streamed import BUNDLE_BYTES, overlap

EXPERTS = "mlp.experts."
BYTES = 4
TWO = {"num_experts": 2, "num_experts_per_tok": 1}


def train_twice(shape: Shape, weights: Any, changes: dict[str, Any]) -> None:
    """Two steps with a change of the weights in between, against one process."""
    grid = Grid.create(shape)
    stock, model = build("qwen3_moe", **TWO | changes), build("qwen3_moe", **TWO | changes)
    report = ff.parallelize(model, grid, weights=weights)
    ids, labels = batch(8)
    rows = grid.local_rows(len(ids))
    for _ in range(2):
        expected = stock(input_ids=ids, labels=labels).loss
        expected.backward()
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0.0)
        assert_shards_close(local_gradients(model), gradients(stock), report, grid)
        for trained in (stock, model):
            torch.optim.SGD(trained.parameters(), lr=0.5).step()
            trained.zero_grad()


@pytest.mark.parametrize("weights", [pytest.param("streamed", marks=pytest.mark.nightly), "fsdp2"])
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((1, 4, 1, 1), {}),
        pytest.param((1, 4, 1, 1), {"num_experts": 6}, marks=pytest.mark.nightly),
        pytest.param((2, 4, 1, 1), {}, marks=pytest.mark.nightly),
    ],
)
def test_gradients_with_more_ranks_than_experts(
    pool: RankPool, weights: str, shape: Shape, changes: dict[str, Any]
) -> None:
    pool.run(train_twice, shape[0] * shape[1], shape, weights, changes)


def stored_and_sent(weights: Any, z: int) -> tuple[dict[str, int], dict[str, float]]:
    """(elements of each expert tensor that this rank stores, bytes sent on z in a step by purpose)."""
    grid = Grid.create((1, z, 1, 1))
    model = build("qwen3_moe", **TWO, vocab_size=64)
    ff.parallelize(model, grid, weights=weights, overlap=overlap(prefetch=0, keep_bytes=0))
    ids, _ = batch(8)
    ids = ids[grid.local_rows(len(ids))] % 64
    with grid.collectives.counting() as account:
        model(input_ids=ids, labels=ids).loss.backward()
    sent: dict[str, float] = defaultdict(float)
    for entry in account:
        if entry.axis == "z" and entry.purpose in ("weight", "gradient"):
            sent[entry.purpose] += entry.bytes_sent
    return {n: p.to_local().numel() for n, p in model.named_parameters() if EXPERTS in n}, dict(sent)


def formula(weights: str, z: int) -> dict[str, float]:
    """The bytes of `stored_and_sent`, from the shapes of the stock model: only what has too few rows and one or two dims is padded."""
    gathered = reduced = 0
    for name, parameter in build("qwen3_moe", **TWO, vocab_size=64).named_parameters():
        size = parameter.numel()
        if parameter.ndim < 3:
            size = -(-parameter.shape[0] // z) * z * parameter[0].numel()
        # In blocks once for forward and once for backward; streamed, all small ones come together once.
        is_small = weights == "streamed" and parameter.numel() * BYTES <= BUNDLE_BYTES
        gathered += size * (2 if ".layers." in name and not is_small else 1)
        reduced += size
    share = BYTES * (z - 1) / z
    return {"weight": gathered * share, "gradient": reduced * share}


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_each_rank_stores_and_sends_the_same_amount(pool: RankPool, weights: str) -> None:
    whole = {
        n: p.numel() for n, p in build("qwen3_moe", **TWO, vocab_size=64).named_parameters() if EXPERTS in n
    }
    found = pool.run(stored_and_sent, 4, weights, 4)
    for stored, sent in found:
        assert stored == {name: size // 4 for name, size in whole.items()}
        assert sent == formula(weights, 4)


def test_runs_resume_on_fewer_ranks_than_experts(pool: RankPool, tmp_path: Path) -> None:
    """Weights and both moments are bit-equal, and training goes on: from z = 4 on z = 2 and 1, and back."""
    grids = reshard.EXPERT_GRIDS[:3]
    verdicts = reshard.reshard(pool, grids, tmp_path, kind="qwen3_moe")
    assert len(verdicts) == len(grids) ** 2
    assert {pair: verdict for pair, verdict in verdicts.items() if not verdict.holds()} == {}
