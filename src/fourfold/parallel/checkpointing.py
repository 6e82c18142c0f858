"""What backward computes again of each block. Does not import torch: the planner's formulas need it, too."""

from __future__ import annotations

from typing import Literal, get_args

# From nothing to all of a block; selective: what lies between linears and attention, which takes little time.
ActivationCheckpointing = Literal["none", "selective", "full"]
KINDS: tuple[ActivationCheckpointing, ...] = get_args(ActivationCheckpointing)


def weaker(kind: ActivationCheckpointing) -> ActivationCheckpointing:
    return KINDS[max(0, KINDS.index(kind) - 1)]


def by_blocks(
    kind: ActivationCheckpointing, count: int | None, blocks: int
) -> list[tuple[ActivationCheckpointing, int]]:
    """(kind, number of blocks), from the first block to the last, if the first ``count`` of them have it (None: all).

    The others have the next weaker kind. The first ones are recomputed more, because backward comes to them last, when the
    activations of the others are freed.

    Example:
        >>> by_blocks("full", 10, 32)
        [('full', 10), ('selective', 22)]
    """
    count = blocks if count is None else count
    if not 0 <= count <= blocks:
        raise ValueError(
            f"checkpointed_blocks={count} is not a number of the model's {blocks} blocks; use 0 to {blocks}"
        )
    if kind == "none":
        return [("none", blocks)]
    return [(of, n) for of, n in ((kind, count), (weaker(kind), blocks - count)) if n]
