"""Sizes of what one rank of y and x computes with: of a block, and of what is in no block."""

from __future__ import annotations

from typing import NamedTuple

from fourfold.planner.inputs.layout import ExpertsLayout
from fourfold.planner.inputs.workload import Workload

# Streamed weights gather four ahead of the one in use: five of a block's seven (or six) matrices.
STREAMED_WINDOW = 5


class ShardSizes(NamedTuple):
    """Elements on one rank before z shards them. Of a model with experts: the mean of its blocks."""

    block: float  # without experts that z ranks own
    matrices: float  # the part of a block that is matrices
    table: float  # the embedding; the head has as many
    outside: float  # what is in no block, each element once
    largest: float  # the largest matrices of a block that are gathered at once
    q: float
    kv: float
    inner: float
    adapters: float = 0.0  # of LoRA, in a block
    owned: float = 0.0  # of experts that z ranks own, in a block
    most: float = 0.0  # of the block with most, and of the experts in it that are gathered
    gathered_experts: float = 0.0

    @property
    def trained(self) -> ShardSizes:
        """What has gradients: all of it, or the adapters alone."""
        if not self.adapters:
            return self
        return ShardSizes(self.adapters, 0.0, 0.0, 0.0, self.adapters, 0.0, 0.0, 0.0, most=self.adapters)


def shard_of(workload: Workload, y: int, x: int, experts: ExpertsLayout = "cut") -> ShardSizes:
    """The part of a block, and of what is outside, that one (y, x) rank computes with."""
    w = workload
    cut = y * x
    # Where x exceeds the key/value heads, every x rank holds all of their rows.
    kv = w.hidden * w.kv_features / (cut if x <= w.kv_heads else y)
    q = w.hidden * w.q_features / cut
    inner = w.hidden * w.ffn / cut
    of_attention = [q, kv, kv, q] if w.latent is None else [m / cut for m in w.attention_matrices]
    matrices = [*of_attention, *([inner] * (3 if w.gated else 2))]
    table = -(-w.vocabulary // x) * w.hidden / y
    positions = w.positions * w.hidden / y
    outside = table * (1 if w.tied else 2) + positions + w.hidden / y
    window = matrices + matrices  # five in a row may reach into the next block
    largest = max(sum(window[i : i + STREAMED_WINDOW]) for i in range(len(matrices)))
    block = sum(matrices) + w.block_vectors / y
    adapters = 0.0
    if w.lora_rank:
        rows = w.q_features / x, *[w.kv_features / (x if x <= w.kv_heads else 1)] * 2
        rows += (w.ffn / x,) * (2 if w.gated else 1)
        colwise = sum(w.hidden / y + out for out in rows) - (2 * w.hidden / y if w.fused_qkv else 0.0)
        adapters = w.lora_rank * (colwise + (w.q_features + w.ffn) / x + 2 * w.hidden / y)
    found = ShardSizes(block, sum(matrices), table, outside, largest, q, kv, inner, adapters, most=block)
    return found if w.experts is None else _with_experts(w, found, sum(of_attention), cut, experts)


def _with_experts(
    w: Workload, dense: ShardSizes, attention: float, cut: int, layout: ExpertsLayout
) -> ShardSizes:
    """Of a mean block, from those of a dense one."""
    e = w.experts
    assert e is not None
    share = w.sparse_layers / w.layers
    own, vectors = w.expert_elements / cut, dense.block - dense.matrices
    shared = (3 if w.gated else 2) * w.hidden * e.shared / cut
    owned = own if "z" in layout and layout != "cut" else 0.0
    sparse = attention + shared + w.hidden * e.number + own - owned
    matrices = share * sparse + (1 - share) * dense.matrices
    return dense._replace(
        block=matrices + vectors,
        matrices=matrices,
        largest=sparse,
        inner=max((own - owned) * 2 / 3, shared / 3, dense.inner * (share < 1)),
        owned=share * owned,
        most=max(sparse, dense.matrices * (share < 1)) + vectors,
        gathered_experts=own - owned,
    )


def sent_bytes(workload: Workload, shard: ShardSizes, work_bytes: int) -> float:
    """Bytes of a block's weights as they are gathered, without adapters."""
    matrices = workload.weight_bytes(work_bytes) * shard.matrices
    return matrices + work_bytes * (shard.block - shard.matrices)
