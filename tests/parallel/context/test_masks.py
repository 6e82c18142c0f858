"""Masks of a part of a sequence: those rows of the mask that transformers makes of the whole, and never much of it at a time."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers import masking_utils as hf

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.parallel.context import masks
from fourfold.parallel.context.chunks import own_tokens
from fourfold.parallel.context.masks import CutMask, Sequences, masks_of
from tests.models import build
from tests.parallel.context.test_model import LENGTH, sample

MAKERS = {
    "causal": hf.create_causal_mask,
    "window": hf.create_sliding_window_causal_mask,
    "chunks": hf.create_chunked_causal_mask,
}


def make(kind: str, implementation: str, length: int, **given: Any) -> Any:
    config = LlamaConfig(hidden_size=8, num_attention_heads=2)
    config._attn_implementation = implementation
    config.sliding_window, config.attention_chunk_size = 5, 6
    return MAKERS[kind](config, inputs_embeds=torch.zeros(4, length, 8), past_key_values=None, **given)


def differing(kind: str, queries: int, keys: int) -> tuple[int, int]:
    """(entries that differ from transformers' mask of the whole rows, the largest part that exists at a time)."""
    with patch.object(masks, "QUERIES", queries), patch.object(masks, "KEYS", keys):
        return _differing(kind)


def _differing(kind: str) -> tuple[int, int]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    positions = sample(4)[2]
    own = own_tokens(positions, grid)
    with masks_of(Sequences.of("a model", grid, own)):
        mask = make(kind, masks.NAME, LENGTH // 2, attention_mask=torch.ones_like(own), position_ids=own)
    assert isinstance(mask, CutMask)
    found, largest = torch.zeros(4, 1, LENGTH // 2, LENGTH, dtype=torch.bool), [0]
    inner = mask.of

    def observed(at: slice, of: slice) -> Tensor:
        part = inner(at, of)
        largest.append(part.numel() // len(part))
        return part

    mask.__dict__["of"] = observed
    for rows, at, of in mask.blocks():
        found[:, :, rows, of] = mask.of(at, of)
    whole = make(kind, "sdpa", LENGTH, attention_mask=None, position_ids=positions)
    expected = own_tokens(whole.transpose(1, 2), grid).transpose(1, 2)
    return int((found != expected).sum()), max(largest)


@pytest.mark.parametrize("kind", list(MAKERS))
def test_blocks_are_rows_of_transformers_own_mask(pool: RankPool, kind: str) -> None:
    for wrong, largest in pool.run(differing, 2, kind, 3, LENGTH):
        assert wrong == 0
        assert largest <= 3 * LENGTH  # not length x length / 2
    for wrong, largest in pool.run(differing, 2, kind, 512, 4):
        assert wrong == 0
        assert largest <= 8 * LENGTH  # a chunk is shorter than a block


def blocks_of(kind: str) -> list[tuple[int, int]]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    own = own_tokens(torch.arange(LENGTH).expand(4, -1), grid)
    with masks_of(Sequences.of("a model", grid, own)):
        mask = make(kind, masks.NAME, LENGTH // 2, attention_mask=torch.ones_like(own), position_ids=own)
    with patch.object(masks, "QUERIES", 4):
        return [(block.keys.start, block.keys.stop) for block in mask.blocks()]


def test_a_block_has_the_keys_that_it_needs(pool: RankPool) -> None:
    assert pool.run(blocks_of, 2, "causal")[0] == [(0, 4), (0, 8), (0, 28), (0, 32)]
    assert pool.run(blocks_of, 2, "window")[0] == [(0, 4), (0, 8), (20, 28), (24, 32)]


def refusals() -> list[str]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    own = own_tokens(torch.arange(LENGTH).expand(4, -1), grid)
    found = []
    with masks_of(Sequences.of("a model", grid, own)):
        mask = make("causal", masks.NAME, LENGTH // 2, attention_mask=torch.ones_like(own), position_ids=own)
        for use in (lambda: mask[:, 0], lambda: mask + 1.0, lambda: mask.shape, lambda: ~mask):
            try:
                use()
            except ff.UnsupportedError as error:
                found.append(str(error))
        for own_rule in ("or_mask_function", "and_mask_function"):
            try:
                make(
                    "causal",
                    masks.NAME,
                    LENGTH // 2,
                    attention_mask=torch.ones_like(own),
                    **{own_rule: hf.causal_mask_function},
                )
            except ff.UnsupportedError as error:
                found.append(str(error))
    return found


def test_what_a_model_does_with_its_mask_is_refused(pool: RankPool) -> None:
    for found in pool.run(refusals, 2):
        assert len(found) == 6, found
        assert all("a model" in said and "sequence_ranks=1" in said for said in found)
        assert all("has a mask of its own" in said for said in found[4:])


def traffic(checkpointing: str) -> dict[str, tuple[int, int]]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    ids, labels, positions = sample(2)
    model = build("llama")
    ff.parallelize(model, grid, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    inputs = ff.cut_sequences(ids, grid, labels=labels, position_ids=positions)
    with grid.collectives.counting() as entries:
        model(**inputs).loss.backward()
    return {e.kind: (e.calls, e.payload_bytes) for e in entries if e.purpose == "keys-values"}


def test_keys_and_values_are_sent_as_the_formula_says(pool: RankPool) -> None:
    layers, features = 2, 2 * 8  # key/value heads times features of a head
    of_all = layers * 2 * LENGTH * 2 * features * 4  # rows, tokens, keys and values, fp32
    for kind, gathers in (("none", 2), ("selective", 2), ("full", 3)):
        for found in pool.run(traffic, 2, kind):
            assert found == {
                "all_gather": (gathers * layers, gathers * of_all),
                "reduce_scatter": (layers, of_all),
            }
