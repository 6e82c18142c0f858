"""Sequences that ranks along z share: traffic, copies and memory of their keys and values (`parallel/context`).

    forward    a gather of keys and values over the c ranks, and a copy in the order of the sequence
    backward   the same again; their gradients in fp32 are added up, put in the order of the ranks, and reduce-scattered

Nothing hides them: the keys of a layer depend on the layer before. Attention itself is causal and cut into a zigzag, so it is as much work
on each rank: tokens of a rank x length / 2, as if it had whole sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload

SUM_BYTES = 4  # gradients of keys and values, which are added up and sent in fp32


class KeysMoved(NamedTuple):
    """Bytes of one block and micro-batch on a rank."""

    gathered: float  # payload of a gather, of which there is one in forward and one in backward
    scattered: float  # payload of the reduce-scatter
    forward: float  # read and written by copies
    backward: float


def shared_numbers(w: Workload, layout: Layout, tokens: float) -> float:
    """Numbers in the keys and values that a rank gathers, those of whole sequences; ``tokens`` are its own."""
    if layout.sequence_ranks == 1:
        return 0.0
    parts = layout.y * layout.x if layout.by_tokens and w.divides_heads(layout.y * layout.x) else layout.x
    return tokens * layout.sequence_ranks * 2 * w.kv_features / min(parts, w.kv_heads)


def moved_by_block(w: Workload, layout: Layout, tokens: float, work_bytes: int) -> KeysMoved:
    """What attention of shared sequences sends and copies besides its own work."""
    whole = shared_numbers(w, layout, tokens)
    own = whole / layout.sequence_ranks
    parts = layout.y * layout.x if layout.by_tokens and w.divides_heads(layout.y * layout.x) else layout.x
    out = 2 * work_bytes * tokens * w.q_features / parts  # each chunk is put in its place
    ordered = 2 * work_bytes * (own + whole)
    # Zeros; each of two chunks adds its prefix, which together are one sequence; the order of the ranks.
    added = whole * (SUM_BYTES + (work_bytes + 2 * SUM_BYTES) + 2 * SUM_BYTES)
    return KeysMoved(work_bytes * whole, SUM_BYTES * whole, ordered + out, ordered + out + added)


def held_in_backward(w: Workload, layout: Layout, tokens: float, work_bytes: int, length: int) -> float:
    """Bytes of a block's keys and values, and of their gradients, at the most in backward."""
    whole = shared_numbers(w, layout, tokens)
    # The kernel has the keys of several rows in one piece, of a single row as they are.
    copies = 2 if tokens * layout.sequence_ranks > length else 1
    by_kernel = whole * (work_bytes + SUM_BYTES + copies * work_bytes)
    sending = whole * SUM_BYTES * (2 + 1 / layout.sequence_ranks)
    return max(by_kernel, sending)
