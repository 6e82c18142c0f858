"""Variable-length flash attention of a chunk's queries to a prefix of the gathered keys: two calls for each layer, without a mask.

Both are aligned at their ends, as the kernel has them, so the last query of a piece attends to its last key. The log-sum-exp of the
scores is kept, so backward does not compute them in a forward of its own. No GPU has run it; the call is tested against PyTorch's
documentation, and its operators by shapes on fake devices.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from fourfold.mesh.grid import Grid
from fourfold.parallel.context.documents import Bounds

_LARGEST_HEAD = 256
# Its backward, for which there is no public name (torch 2.13.0): autograd would save the gathered keys.
_gradients = torch.ops.torch_attn._varlen_attn_backward


def why_not_prefix(grid: Grid, query: Tensor, value: Tensor, *, softcap: bool, sinks: bool) -> str | None:
    """Why a causal layer has no kernel; None if it has."""
    if grid.target != "cuda":
        return "it is for GPUs"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention has no {str(query.dtype).removeprefix('torch.')}"
    if softcap or sinks:
        return "flash attention has no soft cap and no sinks"
    if query.shape[-1] > _LARGEST_HEAD or query.shape[-1] != value.shape[-1]:
        return f"flash attention has no kernel for heads of {query.shape[-1]} and {value.shape[-1]} features"
    return None


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bounds: Bounds, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of a chunk. Queries are [rows, own length, heads, features], keys and values [rows, heads, length, features]."""
    out, lse = varlen_attn(
        query.flatten(0, 1),
        _needed(keys, bounds),
        _needed(values, bounds),
        bounds.of_queries,
        bounds.of_keys,
        bounds.longest_queries,
        bounds.longest_keys,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=_window(window),
        enable_gqa=query.shape[2] != keys.shape[1],
    )
    return out.view(query.shape), lse


def add_gradients(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Bounds,
    scale: float,
    window: int | None,
    sums: tuple[Tensor, ...],
) -> Tensor:
    """The gradient of the queries; those of keys and values are added to ``sums``, which are as wide as these."""
    of_query, *of_keys = _gradients(
        gradient.flatten(0, 1),
        query.flatten(0, 1),
        _needed(keys, bounds),
        _needed(values, bounds),
        out.flatten(0, 1),
        lse,
        bounds.of_queries,
        bounds.of_keys,
        bounds.longest_queries,
        bounds.longest_keys,
        _window(window) == (-1, 0),
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # of dropout, which there is not
        scale,
        list(_window(window)),
    )
    for total, found in zip(sums, of_keys, strict=True):
        pieces = found.split([part.stop - part.start for part in bounds.keys])
        for row, (part, piece) in enumerate(zip(bounds.keys, pieces, strict=True)):
            total[row, :, part] += piece.transpose(0, 1)
    return cast(Tensor, of_query).view(query.shape)


def _window(window: int | None) -> tuple[int, int]:
    """Tokens to the left of a query, besides its own."""
    return (-1 if window is None else window - 1, 0)


def _needed(whole: Tensor, bounds: Bounds) -> Tensor:
    """The keys of all rows one after another, [tokens, heads, features]; those of one row are a view."""
    rows = [row[:, part].transpose(0, 1) for row, part in zip(whole, bounds.keys, strict=True)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
