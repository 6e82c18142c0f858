"""Which tokens of a sequence a rank has: chunks j and 2c-1-j of 2c, so that causal attention is as much work on all c ranks.

The first chunk attends to little, the last one to everything before it; their sum is the same for every pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.mesh.grid import Grid
from fourfold.parallel.loss.head import IGNORE_INDEX


def own_chunks(length: int, ranks: int, rank: int) -> tuple[slice, slice]:
    """The columns of this rank's two chunks.

    Example:
        >>> own_chunks(16, ranks=2, rank=0)
        (slice(0, 4, None), slice(12, 16, None))
    """
    if length % (2 * ranks):
        near = -(-length // (2 * ranks)) * 2 * ranks
        raise ValueError(
            f"sequences of {length} tokens do not divide into the 2 * {ranks} = {2 * ranks} chunks of sequence_ranks={ranks}; "
            f"use {near} tokens, of which the last may be padding without labels"
        )
    size = length // (2 * ranks)
    last = 2 * ranks - 1 - rank
    return slice(rank * size, (rank + 1) * size), slice(last * size, (last + 1) * size)


def own_tokens(whole: Tensor, grid: Grid) -> Tensor:
    """This rank's tokens of [rows, length, ...]: its two chunks, one after the other."""
    if grid.sequence_ranks == 1:
        return whole
    first, last = own_chunks(whole.shape[1], grid.sequence_ranks, grid.coordinate("sequence"))
    return torch.cat([whole[:, first], whole[:, last]], dim=1)


def in_order(by_rank: Tensor, dim: int) -> Tensor:
    """What the ranks have, [ranks, ...] with the tokens of a rank along ``dim`` of its part, as one tensor in the order of the sequence."""
    firsts, lasts = by_rank.unflatten(dim + 1, (2, -1)).unbind(dim + 1)
    return torch.cat([*firsts.unbind(0), *lasts.flip(0).unbind(0)], dim=dim)


def by_rank(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """The inverse of `in_order`."""
    chunks = whole.chunk(2 * ranks, dim)
    parts = whole.new_empty(ranks, *whole.shape[:dim], whole.shape[dim] // ranks, *whole.shape[dim + 1 :])
    for rank in range(ranks):
        torch.cat([chunks[rank], chunks[-1 - rank]], dim=dim, out=parts[rank])
    return parts


def cut_sequences(
    input_ids: Tensor,
    grid: Grid,
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
) -> dict[str, Tensor]:
    """What this rank passes to the model of its rows, [rows, length] each: its tokens, their positions and their labels.

    The rows are whole sequences, `Grid.local_rows` of the global batch. ``labels`` are those of a Hugging Face causal LM, which
    are shifted here, before they are cut: the last token of a chunk predicts the first of the next one. Documents that share a
    row attend to themselves alone: give positions that restart at 0, or a number for each document in ``document_ids``.
    A checksum of each row lets the model's forward find ranks that read different ones.
    ``shift=False`` is for models that predict masked tokens at their own place.
    With ``sequence_ranks=1`` the inputs are those of the whole rows.

    Example:
        >>> own = cut_sequences(ids, grid, labels=ids)
        >>> sorted(own)
        ['input_ids', 'labels', 'position_ids', 'shift_labels']
        >>> model(**own).loss.backward()
    """
    rows, length = input_ids.shape
    if position_ids is not None and document_ids is not None:
        raise ValueError("position_ids and document_ids both say where documents begin; give one of them")
    if document_ids is not None:
        position_ids = positions_of(document_ids)
    elif position_ids is None:
        position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
    given = {"input_ids": input_ids, "position_ids": position_ids.expand(rows, -1)}
    if labels is not None and shift:
        given["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    elif labels is not None:
        given["labels"] = labels
    for name, tensor in given.items():
        if tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} do not match input_ids of shape {tuple(input_ids.shape)}"
            )
    own = {name: own_tokens(tensor, grid).contiguous() for name, tensor in given.items()}
    if "shift_labels" in own:
        # A model computes its loss where it has labels; `shift_labels` says which they are.
        own["labels"] = own["shift_labels"]
    if grid.sequence_ranks > 1:
        own["row_checksums"] = _checksums(input_ids)
    return own


def _checksums(input_ids: Tensor) -> Tensor:
    """A number for each row, which changes with its tokens and their order."""
    places = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    return (input_ids.long() * places * 2_654_435_761).sum(1)


def positions_of(document_ids: Tensor) -> Tensor:
    """The position of each token in its document, of [rows, length] numbers that change where a document begins.

    Example:
        >>> positions_of(torch.tensor([[7, 7, 7, 9, 9, 2]]))
        tensor([[0, 1, 2, 0, 1, 0]])
    """
    columns = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids.diff() != 0
    return columns - torch.where(begins, columns, 0).cummax(dim=1).values
