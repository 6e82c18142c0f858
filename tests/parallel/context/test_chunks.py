"""Which tokens a rank has: all of them once, in pairs that are as much work, and back in the order of the sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ranks import RankPool
from fourfold import Grid, cut_sequences
from fourfold.parallel.context.chunks import by_rank, in_order, own_chunks, positions_of


@given(st.integers(1, 8), st.integers(1, 5))
def test_each_token_is_on_one_rank_and_causal_work_is_equal(ranks: int, size: int) -> None:
    length = 2 * ranks * size
    columns = [
        [c for chunk in own_chunks(length, ranks, r) for c in range(length)[chunk]] for r in range(ranks)
    ]
    assert sorted(column for own in columns for column in own) == list(range(length))
    work = {sum(column + 1 for column in own) for own in columns}  # keys before and at each query
    assert len(work) == 1


@given(st.integers(1, 6), st.integers(1, 3), st.sampled_from([0, 1, 2]))
def test_what_ranks_have_is_put_in_order_and_taken_apart(ranks: int, size: int, dim: int) -> None:
    length = 2 * ranks * size
    shape = [2, 2, 2]
    shape[dim] = length
    whole = torch.randn(shape)
    parts = [
        torch.cat([whole.narrow(dim, chunk.start, size) for chunk in own_chunks(length, ranks, r)], dim)
        for r in range(ranks)
    ]
    assert torch.equal(in_order(torch.stack(parts), dim), whole)
    assert torch.equal(by_rank(whole, ranks, dim), torch.stack(parts))


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"30 tokens do not divide into the 2 \* 4 = 8 chunks.*use 32"):
        own_chunks(30, 4, 0)


def test_positions_restart_with_each_document() -> None:
    numbers = torch.tensor([[3, 3, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]])
    assert positions_of(numbers).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


def own_inputs() -> dict[str, list[list[int]]]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    ids = torch.arange(10, 18).unsqueeze(0)
    labels = torch.tensor([[0, 1, 2, 3, 4, -100, 6, 7]])
    numbers = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2]])
    own = cut_sequences(ids, grid, labels=labels, document_ids=numbers)
    return {name: tensor.tolist() for name, tensor in own.items()}


def test_labels_are_shifted_before_the_cut(pool: RankPool) -> None:
    """The last token of each chunk predicts the first one of the chunk that follows it, which another rank may have."""
    first, second = pool.run(own_inputs, 2)
    assert (first["input_ids"], second["input_ids"]) == ([[10, 11, 16, 17]], [[12, 13, 14, 15]])
    assert (first["position_ids"], second["position_ids"]) == ([[0, 1, 1, 2]], [[2, 3, 4, 0]])
    assert first["labels"] == first["shift_labels"] == [[1, 2, 7, -100]]
    assert second["labels"] == second["shift_labels"] == [[3, 4, -100, 6]]


def grid_facts() -> tuple[int, int, int, list[int], int]:
    grid = Grid.create((1, 4, 1, 1), sequence_ranks=2)
    own = torch.tensor([float(grid.token_rank)])
    gathered = torch.empty(2)
    grid.collectives.all_gather(gathered, own, "sequence", "check").wait()
    return (
        grid.batch_ranks,
        grid.batch_rank,
        grid.coordinate("sequence"),
        gathered.int().tolist(),
        len(range(8)[grid.local_rows(8)]),
    )


def test_neighbours_along_z_read_the_same_rows(pool: RankPool) -> None:
    assert pool.run(grid_facts, 4) == [
        (2, 0, 0, [0, 1], 4),
        (2, 0, 1, [0, 1], 4),
        (2, 1, 0, [2, 3], 4),
        (2, 1, 1, [2, 3], 4),
    ]


def refused_shares() -> list[str]:
    found = []
    for share in (3, 0):
        try:
            Grid.create((1, 2, 1, 1), sequence_ranks=share)
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_that_do_not_divide_z_are_refused(pool: RankPool) -> None:
    for said in pool.run(refused_shares, 2):
        assert [text.partition(":")[0] for text in said] == [
            "sequence_ranks=3 does not divide z=2",
            "sequence_ranks=0 does not divide z=2",
        ]
        assert all("use one of 1, 2" in text for text in said)
