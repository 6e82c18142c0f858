"""FlexAttention of packed rows: with a soft cap, with sinks, in sliding windows, inside documents.

The kernel skips blocks of 128 x 128 scores that no document reaches, and asks `mask_mod` inside of those that one reaches in part. Which these
are follows from the numbers of documents at the ends of each block, on the device: no mask of length x length, and no read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
SMALLEST_HEAD, LARGEST_HEAD = 16, 256  # features that PyTorch has configurations of its kernel for
_GRAPHS = 64  # of windows, shapes, and with or without gradients; one more is an error


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention inside each document. Takes [rows, heads, length, features], returns [rows, length, heads, features].

    ``sinks``: a score of each head to which no value belongs; it takes a part of the softmax.
    """

    def score_mod(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    # In a compiled block it is compiled along; on CPU there are its formulas alone.
    is_alone = query.is_cuda and not torch.compiler.is_compiling()
    attention: Any = _compiled() if is_alone else flex_attention
    out, aux = attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=_mask_of(positions, len(query), window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        # Not the kernel for short sequences, nor the one whose gradient has no log-sum-exp.
        kernel_options={"BACKEND": "TRITON"},
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        # The softmax with a sink is that without, times exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(aux.lse - sinks.float().view(-1, 1)).unsqueeze(-1)
        out = (out * share).to(query.dtype)
    found: Tensor = out.transpose(1, 2)
    return found


_attention: list[Callable[..., Any]] = []


def _compiled() -> Callable[..., Any]:
    """FlexAttention is a kernel only where it is compiled."""
    if not _attention:
        graph = torch.compile(flex_attention, fullgraph=True, dynamic=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
                return graph(*args, **kwargs)

        _attention.append(run)
    return _attention[0]


# -- documents and windows --------------------------------------------------------------------------------------------


def _mask_of(positions: Tensor, rows: int, window: int | None) -> BlockMask:
    """The mask of these positions; made once for all layers, which get the same tensor."""
    if torch.compiler.is_compiling():
        return document_mask(positions.expand(rows, -1), window)
    known: dict[Any, BlockMask] = positions.__dict__.setdefault("_masks", {})
    if (rows, window) not in known:
        known[rows, window] = document_mask(positions.expand(rows, -1), window)
    return known[rows, window]


def document_mask(positions: Tensor, window: int | None) -> BlockMask:
    """Which blocks of scores each block of queries needs, of [rows, length] positions: a document begins where they do not go on.

    Example:
        >>> document_mask(torch.arange(512).view(1, -1) % 256, window=None).to_dense()[0, 0]
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    length = positions.shape[1]
    documents = torch.nn.functional.pad((positions.diff(dim=1) != 1).cumsum(1), (1, 0)).int()

    def mask_mod(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (query >= key) & (documents[row, query] == documents[row, key])
        return allowed if window is None else allowed & (query - key < window)

    # The first and the last token of each block, and their documents: numbers of documents only grow along a row.
    firsts = torch.arange(0, length, BLOCK, device=positions.device)
    lasts = (firsts + BLOCK - 1).clamp(max=length - 1)
    begins, ends = documents[:, firsts], documents[:, lasts]
    reached = (ends[:, None, :] >= begins[:, :, None]) & (firsts <= firsts[:, None])
    # All scores are needed: one document, before the diagonal; not of a last block that is shorter.
    whole = (begins[:, None, :] == ends[:, :, None]) & (firsts < firsts[:, None])
    whole = whole & (firsts + BLOCK <= length)[:, None]
    if window is not None:
        reached = reached & (firsts[:, None] - lasts < window)
        whole = whole & (lasts[:, None] - firsts < window)
    return BlockMask.from_kv_blocks(
        *_in_order(reached & ~whole),
        *_in_order(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(length, length),
    )


def _in_order(needed: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries needs, and which, those first; for all heads."""
    order = needed.int().argsort(dim=-1, descending=True, stable=True)
    return needed.sum(-1).int().unsqueeze(1), order.int().unsqueeze(1)
