"""Chunks that attend to prefixes of the keys by cumulative lengths: the rows of the mask, and exact with a reference of the kernel."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest
from transformers import MistralConfig, MistralForCausalLM
from transformers import masking_utils as hf

from benchmarks.ranks import RankPool
from fourfold.parallel.context import documents, prefix
from fourfold.parallel.context.chunks import own_chunks, positions_of
from fourfold.parallel.context.documents import bounds_of, sizes_of
from fourfold.parallel.context.masks import causal_window
from tests.models import LLAMA_LIKE, MODELS
from tests.parallel.context.test_model import assert_exact, train

nightly = pytest.mark.nightly


def allowed(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """What the kernel's documentation says of one piece: both end together, and a query sees so many tokens to its left."""
    left, right = window
    ago = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    return (ago >= -right) & ((ago <= left) | (left < 0))


def pieces(of_queries: Tensor, of_keys: Tensor) -> list[tuple[slice, slice]]:
    ends = [list(map(int, tensor)) for tensor in (of_queries, of_keys)]
    return [
        (slice(q, r), slice(k, m))
        for q, r, k, m in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False)
    ]


@given(st.data())
def test_bounds_are_the_rows_of_the_mask(data: st.DataObject) -> None:
    ranks, size, rows = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 3)),
    )
    length = 2 * ranks * size
    begins = data.draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
    window = data.draw(st.none() | st.integers(1, length))
    numbers = torch.tensor(begins).view(rows, length).long().cumsum(1)
    positions = positions_of(numbers)
    chunks = own_chunks(length, ranks, data.draw(st.integers(0, ranks - 1)))
    _, sizes = sizes_of(positions, chunks, ())
    places = torch.arange(length)
    ago = places.unsqueeze(1) - places
    whole = (ago >= 0) & (ago < (window or length)) & (numbers.unsqueeze(2) == numbers.unsqueeze(1))
    for chunk, of_chunk in zip(chunks, sizes, strict=True):
        bounds = bounds_of(positions, chunk, of_chunk, window)
        # Rows of queries and keys as they follow one another in the call.
        places_of_keys = [(row, key) for row, part in enumerate(bounds.keys) for key in range(length)[part]]
        found = torch.zeros(rows, size, length, dtype=torch.bool)
        for queries, keys in pieces(bounds.of_queries, bounds.of_keys):
            mask = allowed(queries.stop - queries.start, keys.stop - keys.start, prefix._window(window))
            for i, query in enumerate(range(queries.start, queries.stop)):
                for j, key in enumerate(range(keys.start, keys.stop)):
                    row, place = places_of_keys[key]
                    assert row == query // size
                    found[row, query % size, place] = mask[i, j]
        assert torch.equal(found, whole[:, chunk])
        assert int(bounds.of_queries[-1]) == rows * size
        assert int(bounds.of_keys[-1]) == len(places_of_keys)
        assert int(bounds.of_queries.diff().max()) == bounds.longest_queries
        assert int(bounds.of_keys.diff().max()) <= bounds.longest_keys <= length


def test_where_each_row_is_one_document_the_sizes_need_no_device() -> None:
    positions = torch.arange(48).expand(3, -1)
    for rank in range(4):
        chunks = own_chunks(48, 4, rank)
        assert sizes_of(positions, chunks, ()) == documents.one_document(positions, chunks, ())
        places = [0, 5, 47]
        assert documents.tokens_before(positions, places) == documents.all_before(positions, places)


def test_masks_of_transformers_are_known() -> None:
    assert causal_window(hf.causal_mask_function) == (True, None)
    assert causal_window(hf.sliding_window_causal_mask_function(7)) == (True, 7)
    for other in (
        hf.bidirectional_mask_function,
        hf.chunked_causal_mask_function(7, torch.zeros(1)),
        hf.sliding_window_bidirectional_mask_function(7),
        hf.and_masks(hf.sliding_window_overlay(7), hf.bidirectional_mask_function),
        hf.and_masks(hf.causal_mask_function, hf.causal_mask_function, hf.causal_mask_function),
        hf.or_masks(hf.sliding_window_overlay(7), hf.causal_mask_function),
        lambda row, head, query, key: key <= query,
    ):
        assert causal_window(other) == (False, None)


# -- references of the kernel, in the words of its documentation ---------------------------------------------------------


calls: list[str] = []


def scores_of(query: Tensor, key: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    """Of one piece: [heads, queries, keys]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~allowed(len(query), len(key), window), float("-inf"))


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key))
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(cu_seq_k.diff().max())
    assert return_aux.lse
    assert enable_gqa == (query.shape[1] != key.shape[1])
    calls.append("forward")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out, sums = [], []
    for of_query, of_key in pieces(cu_seq_q, cu_seq_k):
        scores = scores_of(query[of_query], key[of_key], scale, window_size)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[of_key]))
        sums.append(scores.logsumexp(-1))
    return torch.cat(out), torch.cat(sums, dim=1)


def reference_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the log-sum-exp, without a softmax of its own."""
    assert is_causal == (tuple(window_size) == (-1, 0))
    calls.append("backward")
    groups = query.shape[1] // key.shape[1]
    wide = [tensor.repeat_interleave(groups, 1) for tensor in (key, value)]
    found = [torch.zeros_like(tensor) for tensor in (query, *wide)]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for q, k in pieces(cu_seq_q, cu_seq_k):
        weights = (scores_of(query[q], wide[0][k], scale, tuple(window_size)) - lse[:, q].unsqueeze(2)).exp()
        found[2][k] = torch.einsum("hqk,qhd->khd", weights, grad_out[q])
        of_weights = torch.einsum("qhd,khd->hqk", grad_out[q], wide[1][k])
        of_scores = weights * (of_weights - (grad_out[q] * out[q]).sum(-1).transpose(0, 1).unsqueeze(2))
        found[0][q] = factor * torch.einsum("hqk,khd->qhd", of_scores, wide[0][k])
        found[1][k] = factor * torch.einsum("hqk,qhd->khd", of_scores, query[q])
    heads = key.shape[1]
    of_key, of_value = (tensor.unflatten(1, (heads, groups)).sum(2) for tensor in found[1:])
    return found[0], of_key, of_value


def train_by_kernel(*given: Any) -> tuple[tuple[float, float], tuple[int, int]]:
    """(errors of a step, calls of the kernel forward and backward)."""
    calls.clear()
    with (
        patch.dict(
            MODELS, {"mistral": (MistralForCausalLM, MistralConfig, LLAMA_LIKE | {"sliding_window": 5})}
        ),
        patch.object(prefix, "why_not_prefix", lambda *_, **__: None),
        patch.object(prefix, "varlen_attn", reference),
        patch.object(prefix, "_gradients", reference_backward),
    ):
        found = train(*given)
    return found, (calls.count("forward"), calls.count("backward"))


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("qwen3", (1, 2, 1, 1), {"activation_checkpointing": "selective"}),
        pytest.param("llama", (1, 2, 1, 1), {}, marks=nightly),
        pytest.param("llama", (1, 2, 1, 1), {"activation_checkpointing": "full"}, marks=nightly),
        pytest.param("llama", (1, 2, 1, 2), {"activation_checkpointing": "selective"}, marks=nightly),
        pytest.param("mistral", (1, 2, 1, 1), {"activation_checkpointing": "selective"}, marks=nightly),
    ],
)
def test_the_calls_of_the_kernel_are_exact(
    pool: RankPool, kind: str, shape: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    ranks = 2 * shape[3]
    found = pool.run(train_by_kernel, ranks, shape, 2, kind, options)
    assert_exact([errors for errors, _ in found])
    if shape[3] > 1:
        return  # half-batches attend each for itself
    layers, steps = 2, 2
    # Attention's output and log-sum-exp are kept, unless all is recomputed.
    forwards = 2 if options.get("activation_checkpointing") == "full" else 1
    for _, (forward, backward) in found:
        assert (forward, backward) == (2 * layers * steps * forwards, 2 * layers * steps)
