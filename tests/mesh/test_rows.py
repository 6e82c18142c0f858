"""Rows that ranks send each other: the values and gradients of one process, and the bytes that are sent."""

import pytest
import torch

from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh.rows import RowSizes, exchange_counts, send_rows, sizes_of

# Rows of each of three ranks for each: rank 1 gets none, and rank 2 sends none.
SENT = ((1, 0, 3), (2, 0, 1), (0, 0, 0))
WIDTH = 4


def rows_of(rank: int) -> torch.Tensor:
    count = max(1, sum(SENT[rank]))
    return (100.0 * rank + torch.arange(count * WIDTH, dtype=torch.float32)).view(count, WIDTH)


def send(
    dtype: torch.dtype,
) -> tuple[RowSizes, torch.Tensor, torch.Tensor, list[tuple[str, int, int, float]]]:
    grid = Grid.create((1, 3, 1, 1))
    rank = grid.coordinate("z")
    counts = torch.tensor(SENT[rank]).view(3, 1)
    rows = rows_of(rank).to(dtype).requires_grad_()
    with grid.collectives.counting() as entries:
        told = exchange_counts(counts, grid.collectives, "z")
        sizes = sizes_of(counts, told, grid.collectives, "z", sum(SENT[rank]))
        arrived = send_rows(rows, sizes, grid.collectives, "z", "dispatch")
        (arrived * (rank + 2)).sum().backward()
    assert rows.grad is not None
    found = [(e.purpose, e.calls, e.payload_bytes, e.bytes_sent) for e in entries]
    return sizes, arrived.detach(), rows.grad, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_and_their_gradients_come_back(pool: RankPool, dtype: torch.dtype) -> None:
    for rank, (sizes, arrived, gradient, found) in enumerate(pool.run(send, 3, dtype)):
        assert list(sizes.sent) == list(SENT[rank])
        assert list(sizes.received) == [SENT[other][rank] for other in range(3)]
        pieces = []
        for other in range(3):
            first = sum(SENT[other][:rank])
            pieces.append(rows_of(other)[first : first + SENT[other][rank]])
        expected = torch.cat(pieces)
        if not len(expected):  # a row of zeros stands for none
            expected = torch.zeros(1, WIDTH)
        torch.testing.assert_close(arrived, expected.to(dtype), rtol=0, atol=0)
        multiplied = [float(other + 2) for other in range(3) for _ in range(SENT[rank][other])] or [0.0]
        torch.testing.assert_close(
            gradient, torch.tensor(multiplied).to(dtype).unsqueeze(1).expand(-1, WIDTH), rtol=0, atol=0
        )
        row = WIDTH * dtype.itemsize
        away = sum(SENT[rank]) - SENT[rank][rank]
        received_from_others = sum(sizes.received) - sizes.received[rank]
        assert found == [
            ("counts", 1, 3 * 8, 2 * 8.0),
            (
                "dispatch",
                2,
                (sum(SENT[rank]) + sum(sizes.received)) * row,
                (away + received_from_others) * row,
            ),
        ]
