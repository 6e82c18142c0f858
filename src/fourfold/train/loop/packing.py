"""Check that documents packed into one row do not attend to each other in this model.

With a mask, transformers (5.22) reads documents off the positions only without an attention mask of the caller's and without a
key/value cache, and with FlashAttention only for one row at a time; otherwise documents attend to each other without a warning.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fourfold.hf.packed_attention import packed_inputs
from fourfold.mesh.grid import Grid
from fourfold.parallel.context.chunks import own_tokens
from fourfold.parallel.loss.cross_entropy import full_logits
from fourfold.weights.api import evaluating

DOCUMENT_TOKENS = 8
TOLERANCE = 1e-4  # of the largest logit; masked positions add exact zeros, a leak changes logits by percents


def check_documents_stay_apart(model: nn.Module, grid: Grid, *, rows: int, vocab_size: int) -> None:
    """Raise if the logits of one document depend on the document before it in the row.

    ``rows``: of a micro-batch. Two small forwards; all ranks of a sharded model have to call it.
    """
    generator = torch.Generator().manual_seed(0)
    # So that tensor ranks divide the tokens of a rank.
    chunks = 2 * grid.sequence_ranks
    document = math.lcm(DOCUMENT_TOKENS, grid.x * chunks, grid.y * chunks)
    ids = torch.randint(vocab_size, (rows, 3 * document), generator=generator)
    # Two documents; the second starts elsewhere in every other row, to detect a row with the mask of another.
    starts = document * (1 + torch.arange(rows) % 2).unsqueeze(1)
    columns = torch.arange(3 * document).expand(rows, -1)
    in_second = columns >= starts
    other = torch.where(in_second, ids, (ids + vocab_size // 2) % vocab_size)
    positions = own_tokens(torch.where(in_second, columns - starts, columns), grid)
    packed = packed_inputs(positions, grid.device)
    compared = own_tokens(in_second, grid).to(grid.device)
    found = []
    with evaluating(model):
        for given in (ids, other):
            own = model(input_ids=own_tokens(given, grid).to(grid.device), **packed).logits
            full = full_logits(own, grid, vocab_size=vocab_size, batch=positions.shape)
            found.append(full[compared].float())
    logits, changed = found
    if logits.numel() and (logits - changed).abs().max() > TOLERANCE * logits.abs().max():
        attention = getattr(getattr(model, "config", None), "_attn_implementation", "unknown")
        raise ValueError(
            f"{type(model).__name__} lets documents that share a row attend to each other (attention {attention!r}, {rows} "
            "rows at a time): use attn_implementation='sdpa' and config.use_cache=False, or one row at a time "
            "(micro_batch_sequences=1) with FlashAttention"
        )
