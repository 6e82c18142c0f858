"""The size of a chunk of the loss. Does not import torch: the planner's formulas need it, too."""

from __future__ import annotations

CHUNK_BYTES = 128 * 2**20  # of a chunk of the logits in fp32; the loss has a few of that size


def gradient_rows(features: int) -> int:
    """Rows of the head's gradient that are computed at a time."""
    return max(1, CHUNK_BYTES // (4 * features))


def chunk_tokens(vocabulary: int, x: int) -> int:
    """Tokens of a chunk of the logits, equal on all ranks.

    Example:
        >>> chunk_tokens(128256, 1), chunk_tokens(128256, 8)
        (261, 2092)
    """
    return max(1, CHUNK_BYTES // (4 * -(-vocabulary // x)))
