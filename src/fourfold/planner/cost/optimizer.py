"""The optimizer's step on one rank: the state it keeps, the bytes it holds, its time and its collectives.

AdamW works on shards alone. Muon (`optim/muon.py`) keeps one momentum for the matrices of the blocks, which AdamW does not
update. Matrices that are sharded alike are redistributed, as many at a time as there are shards: an all-to-all over
each axis gives each rank one full matrix in bf16, which Newton-Schulz orthogonalises; then they are sent back. No overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from fourfold.optim.kinds import Optimizer
from fourfold.planner.cost.collective import Kind
from fourfold.planner.cost.compute import Kernels, matmul_s, memory_s
from fourfold.planner.inputs.cluster import Device
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload

# Of each parameter: two moments, which Muon's AdamW has in fp32; one momentum.
ADAMW_STATE_BYTES: dict[Optimizer, int] = {"adamw": 8, "adamw-bf16": 4, "muon": 8}
MUON_STATE_BYTES = 4
_NEWTON_SCHULZ_STEPS = 5
_BF16 = 2


class Matrices(NamedTuple):
    """All matrices of the model that are sharded alike."""

    rows: int
    columns: int
    number: int
    axes: dict[str, tuple[int, int]]  # that shard them: ranks, and ranks between neighbours

    @property
    def elements(self) -> float:
        return float(self.rows) * self.columns

    @property
    def shards(self) -> int:
        return math.prod(ranks for ranks, _ in self.axes.values())

    @property
    def rounds(self) -> int:
        """Redistributions until every matrix was on some rank."""
        return -(-self.number // self.shards)

    @property
    def filled(self) -> float:
        """The part of a redistribution that holds matrices."""
        return min(1.0, self.number / self.shards)


def muon_matrices(w: Workload, layout: Layout) -> list[Matrices]:
    """The matrices that Muon updates. A packed gate and up projection is counted as two matrices."""
    sizes = {"z": (layout.z, layout.y * layout.x), "y": (layout.y, layout.x), "x": (layout.x, 1)}
    axes = {axis: size for axis, size in sizes.items() if size[0] > 1}
    # Key/value heads that are fewer than x are on every x rank.
    kv_axes = axes if layout.x <= w.kv_heads else {a: size for a, size in axes.items() if a != "x"}
    attention = [(w.q_features, w.hidden, 1, axes), (w.kv_features, w.hidden, 2, kv_axes)]
    if w.fused_qkv:
        attention = [(w.q_features + 2 * w.kv_features, w.hidden, 1, axes)]
    mlp = [(w.ffn, w.hidden, 2 if w.gated else 1, axes), (w.hidden, w.ffn, 1, axes)]
    found = [*attention, (w.hidden, w.q_features, 1, axes), *mlp]
    return [Matrices(rows, columns, w.layers * count, over) for rows, columns, count, over in found]


def muon_step_bytes(matrices: Matrices) -> float:
    """What a rank holds most while matrices that are sharded alike are updated, in addition to gradients and state."""
    full = _BF16 * matrices.elements
    gram = _BF16 * float(min(matrices.rows, matrices.columns)) ** 2
    # The direction and two iterates with two products, or the direction and one iterate with three.
    newton_schulz = max(3 * full + 2 * gram, 2 * full + 3 * gram)
    # On the way back, the full matrix and what is sent and received over an axis, with copies of both from the second on.
    exchange = full + full * {0: 1, 1: 2}.get(len(matrices.axes), 4)
    directions = 4 * matrices.elements * matrices.filled  # fp32
    return directions + max(newton_schulz, exchange)


class OptimizerTime(NamedTuple):
    compute_s: float
    link_s: dict[str, float]  # by axis


def muon_time(
    w: Workload,
    layout: Layout,
    device: Device,
    kernels: Kernels,
    collective_s: Callable[[Kind, float, int, int], float],
) -> OptimizerTime:
    """Seconds of Muon's step, without what AdamW updates."""
    compute_s = 0.0
    link_s = {"x": 0.0, "y": 0.0, "z": 0.0, "data": 0.0}
    for matrices in muon_matrices(w, layout):
        short, long = sorted((matrices.rows, matrices.columns))
        products = ((short, short, long), (short, short, short), (short, long, short))
        iteration_s = sum(matmul_s(1, *sizes, device, kernels.matmul_share) for sizes in products)
        # Momentum, direction and update of each shard; tables filled, copied and emptied, for each axis again.
        moved = 48 * matrices.filled + 18 + 16 * max(0, len(matrices.axes) - 1)
        elementwise_s = memory_s(moved * matrices.elements, device)
        compute_s += matrices.rounds * (_NEWTON_SCHULZ_STEPS * iteration_s + elementwise_s)
        for axis, (ranks, inner) in matrices.axes.items():
            one_way_s = collective_s("all_to_all", _BF16 * matrices.elements, ranks, inner)
            link_s[axis] += 2 * matrices.rounds * one_way_s
    return OptimizerTime(compute_s, link_s)
