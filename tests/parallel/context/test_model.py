"""Ranks along z that share sequences: loss and gradients are those of the stock model on whole sequences, in one process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from tests.models import VOCABULARY, build

LENGTH = 32
# Documents begin at these columns of each row: inside chunks, at their borders, and one document that is as long as the row.
BEGINS: tuple[tuple[int, ...], ...] = ((0, 5, 8, 27), (0,), (0, 16), (0, 1, 2, 30))


def documents(rows: int) -> Tensor:
    """The number of the document of each token."""
    begins = torch.zeros(rows, LENGTH, dtype=torch.long)
    for row in range(rows):
        begins[row, list(BEGINS[row % len(BEGINS)])] = 1
    return begins.cumsum(1)


def sample(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, labels as a causal LM takes them, positions): documents are apart, and rows have different numbers of labels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    of = documents(rows)
    labels = ids.clone()
    labels[:, 1:][
        of.diff() != 0
    ] = -100  # the first token of a document is not predicted from the one before it
    for row in range(rows):
        labels[row, : 3 * row] = -100
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in r.unique(return_counts=True)[1]]) for r in of]
    )
    return ids, labels, positions


def stock(
    kind: str, ids: Tensor, labels: Tensor, positions: Tensor, **changes: Any
) -> tuple[float, dict[str, Tensor]]:
    model = build(kind, **changes)
    # With a cache transformers does not read documents off the positions.
    loss = model(input_ids=ids, labels=labels, position_ids=positions, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def errors(
    model: nn.Module, report: ff.Report, loss: Tensor, expected: tuple[float, dict[str, Tensor]]
) -> tuple[float, float]:
    """(relative error of the loss, the worst error of a gradient, of its maximum)."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        layout = report.layouts[name]
        whole = expected[1][layout.hf_name]
        assert isinstance(parameter.grad, DTensor)
        own, shard = parameter.grad.to_local(), layout.of(whole, layout.shard(report.grid))
        if own.numel():
            worst = max(worst, float((own - shard).abs().max() / whole.abs().max()))
    return abs(loss.item() - expected[0]) / expected[0], worst


def train(
    shape: tuple[int, int, int, int], share: int, kind: str = "llama", options: dict[str, Any] | None = None
) -> tuple[float, float]:
    """One step of packed rows on a grid, against the stock model in this process."""
    grid = Grid.create(shape, sequence_ranks=share)
    rows = 2 * grid.batch_ranks
    ids, labels, positions = sample(rows)
    expected = stock(kind, ids, labels, positions)
    model = build(kind)
    report = ff.parallelize(model, grid, **options or {})
    own = grid.local_rows(rows)
    inputs = ff.cut_sequences(ids[own], grid, labels=labels[own], position_ids=positions[own])
    for _ in range(2):  # in the second step weights come in the recorded order, and half-batches alternate
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
    return errors(model, report, loss, expected)


def assert_exact(found: list[tuple[float, float]]) -> None:
    assert max(loss for loss, _ in found) < 1e-5, found
    assert max(gradient for _, gradient in found) < 1e-4, found


def test_llama_is_exact_on_two_ranks(pool: RankPool) -> None:
    assert_exact(pool.run(train, 2, (1, 2, 1, 1), 2))


def test_llama_is_exact_on_tensor_ranks_too(pool: RankPool) -> None:
    assert_exact(pool.run(train, 4, (1, 2, 1, 2), 2))


def test_llama_is_exact_with_four_parts_and_two_groups(pool: RankPool) -> None:
    assert_exact(pool.run(train, 4, (1, 4, 1, 1), 4))
    assert_exact(pool.run(train, 4, (1, 4, 1, 1), 2))
