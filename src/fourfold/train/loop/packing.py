"""Do the documents that share a row stay apart in this model? It is asked, not believed.

transformers (5.22) reads documents off the positions only without an attention mask and without a key/value cache, and
with FlashAttention only for one row at a time; otherwise it lets them see each other and says nothing.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fourfold.mesh.grid import Grid
from fourfold.parallel.loss import full_logits
from fourfold.weights.api import evaluating

DOCUMENT_TOKENS = 8
TOLERANCE = 1e-4  # of the largest logit; what is masked adds exact zeros, a leak changes logits by percents


def check_documents_stay_apart(model: nn.Module, grid: Grid, *, rows: int, vocab_size: int) -> None:
    """Refuse a model whose logits of one document depend on the one before it in the row.

    ``rows``: those that the model is given at a time. Two small forwards; on a cut model all ranks have to call it.
    """
    drawn = torch.Generator().manual_seed(0)
    document = math.lcm(DOCUMENT_TOKENS, grid.x, grid.y)  # so that tokens can be dealt out to tensor ranks
    ids = torch.randint(vocab_size, (rows, 3 * document), generator=drawn)
    # Two documents, the second of which begins elsewhere in every other row: a row with another's mask would show.
    begins = document * (1 + torch.arange(rows) % 2).unsqueeze(1)
    places = torch.arange(3 * document).expand(rows, -1)
    in_second = places >= begins
    other = torch.where(in_second, ids, (ids + vocab_size // 2) % vocab_size)
    positions = torch.where(in_second, places - begins, places).to(grid.device)
    found = []
    with evaluating(model):
        for given in (ids, other):
            own = model(input_ids=given.to(grid.device), position_ids=positions).logits
            whole = full_logits(own, grid, vocab_size=vocab_size, batch=ids.shape)
            found.append(whole[in_second.to(whole.device)].float())
    logits, changed = found
    if (logits - changed).abs().max() > TOLERANCE * logits.abs().max():
        attention = getattr(getattr(model, "config", None), "_attn_implementation", "unknown")
        raise ValueError(
            f"{type(model).__name__} lets documents that share a row see each other (attention {attention!r}, {rows} "
            "rows at a time): use attn_implementation='sdpa' and config.use_cache=False, or one row at a time "
            "(micro_batch_sequences=1) with FlashAttention"
        )
