"""Attention in a dry run. FlexAttention has no kernel on the CPU, where its tensors are: stock attention, with as much memory and work.

And of cut sequences what a device would be asked for: how many documents there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fourfold.dry_run.recorder import replaced
from fourfold.parallel.context import documents

FLEX_STAND_IN = "fourfold_flex_stand_in"


@contextmanager
def whole_documents() -> Iterator[None]:
    """Inside, each row of cut sequences is one document."""
    sizes = replaced(documents, "sizes_of", documents.one_document)
    with sizes, replaced(documents, "tokens_before", documents.all_before):
        yield


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    # A selective block, unless it is compiled, computes FlexAttention again: it has no operator whose results are kept.
    with torch._C.DisableTorchFunction():
        out, _weights = sdpa_attention_forward(
            module, query, key, value, None, dropout, scaling, is_causal=True
        )
    if s_aux is not None:
        share = torch.sigmoid(out.new_zeros((*out.shape[:-1], 1), dtype=torch.float32) - s_aux.view(-1, 1))
        out = (out * share).to(query.dtype)
    return out, None


AttentionInterface.register(FLEX_STAND_IN, attend)
