"""The sizes of the parts of the loss. Does not import torch: the planner's formulas need them, too."""

from __future__ import annotations

# Of a chunk of the logits: the head's gradient is read and written once for each, however few tokens it has.
CHUNK_BYTES = 256 * 2**20
PIECE_BYTES = 128 * 2**20  # of what exists in fp32 at a time: a piece of a chunk, and of the head's gradient
_TILE = 128  # rows of a matmul's tile on GPUs


def gradient_rows(features: int) -> int:
    """Rows of the head's gradient that are computed at a time."""
    return max(1, PIECE_BYTES // (4 * features))


def piece_tokens(columns: int) -> int:
    """Tokens of a chunk whose cross entropy is computed at a time, in fp32."""
    return max(1, PIECE_BYTES // (4 * max(1, columns)))


def chunk_tokens(vocabulary: int, x: int, each_bytes: int) -> int:
    """Tokens of a chunk of the logits, equal on all ranks; a logit takes ``each_bytes``.

    Example:
        >>> chunk_tokens(128256, 1, 2), chunk_tokens(128256, 8, 2)
        (1024, 8320)
    """
    tokens = CHUNK_BYTES // (each_bytes * -(-vocabulary // x))
    return tokens // _TILE * _TILE or max(1, tokens)
