"""All layouts of a workload on N ranks: those that can run ranked, the others with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

from fourfold.mesh.axes import divisors, factorisations
from fourfold.parallel.checkpointing import KINDS, ActivationCheckpointing, weaker
from fourfold.planner.cost.block import groups_of
from fourfold.planner.cost.float8 import why_not_float8
from fourfold.planner.cost.memory import WORK_BYTES, Memory
from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.experts import owners_of
from fourfold.planner.inputs.layout import (
    ACCUMULATION,
    EXPERTS,
    Accumulation,
    Activations,
    ExpertsLayout,
    Layout,
    undivided_axis,
)
from fourfold.planner.inputs.workload import Workload
from fourfold.weights.quantization import BLOCK

# The part of a device's memory for its context, the library's buffers and what an allocator cannot use.
RESERVE = 0.10
_MOST_TENSOR_RANKS = 1024


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run or does not fit, with the reason."""

    layout: Layout
    reason: str
    over_bytes: float = 0.0  # of memory; 0 where a size does not divide


@dataclass(frozen=True)
class Plan:
    """All layouts, the fastest first."""

    ranked: list[Estimate]
    rejected: list[Rejected]
    ranks: int
    memory_limit_bytes: float
    notes: tuple[str, ...] = ()

    @property
    def considered(self) -> int:
        return len(self.ranked) + len(self.rejected)

    @property
    def best(self) -> Estimate:
        if not self.ranked:
            first = self.nearest_miss()
            raise ValueError(
                f"none of {self.considered} layouts of {self.ranks} ranks can run; the nearest: {first.layout}: {first.reason}"
            )
        return self.ranked[0]

    def nearest_miss(self) -> Rejected:
        """The layout that exceeds the memory by the least; any other if none failed for memory."""
        over = [r for r in self.rejected if r.over_bytes > 0]
        return min(over, key=lambda r: r.over_bytes) if over else self.rejected[0]


def why_not_grid(
    workload: Workload, grid: tuple[int, int, int, int], batch_sequences: int | None
) -> str | None:
    """Why a grid cannot run this model; None if it can. The rules are those of `parallelize`; with None the batch has others.

    Example:
        >>> why_not_grid(Workload("8b", 4096, 14336, 32, 32, 8, 128, 128256), (1, 1, 1, 64), 64)
        'x=64 does not divide num_attention_heads=32; use x <= 32'
    """
    _, _, y, x = grid
    w = workload
    kv_heads = f"num_key_value_heads={w.kv_heads}"
    reason = _undivided("x", x, w.heads, f"num_attention_heads={w.heads}")
    if reason is None and w.fused_qkv:
        reason = _undivided("x", x, w.kv_heads, f"{kv_heads}, which are in one matrix with the query heads")
    elif reason is None and x <= w.kv_heads:
        reason = _undivided("x", x, w.kv_heads, kv_heads)
    elif reason is None and x % w.kv_heads:
        reason = f"x={x} is not a multiple of {kv_heads}; use x <= {_below(w.kv_heads, x)}"
    return (
        reason
        or _undivided("x", x, w.ffn if w.sparse_layers < w.layers else 0, f"intermediate_size={w.ffn}")
        or _undivided("x", x, w.experts.shared if w.experts else 0, "the inner features of shared experts")
        or _undivided("y", y, w.hidden, f"hidden_size={w.hidden}")
        or _why_not_packed(w, y, x)
        or (None if batch_sequences is None else _why_not_batch(grid, batch_sequences))
    )


def _why_not_batch(grid: tuple[int, int, int, int], batch_sequences: int) -> str | None:
    return _undivided("data*z", grid[0] * grid[1], batch_sequences, f"the global batch of {batch_sequences}")


def ways_to_share(
    workload: Workload,
    grid: tuple[int, int, int, int],
    batch_sequences: int,
    length: int,
    asked: int | Literal["auto"],
) -> list[tuple[int, list[int]]] | str:
    """(ranks that share a sequence, numbers of micro-batches) of a grid, or why there are none.

    "auto": as few ranks as allow so small a micro-batch, since they send more the more they are.

    Example:
        >>> from fourfold.planner.inputs.workload import Workload
        >>> ways_to_share(Workload("8b", 4096, 14336, 32, 32, 8, 128, 128256), (1, 8, 1, 8), 4, 131072, "auto")
        [(2, [1]), (4, [2]), (8, [4])]
    """
    data, z, *_ = grid
    ways: list[tuple[int, list[int]]] = []
    seen: set[int] = set()
    for share in divisors(z) if asked == "auto" else [asked]:
        if z % share or (batch_sequences * share) % (data * z) or (share > 1 and length % (2 * share)):
            continue
        if share > 1 and workload.not_shared:
            break
        counts = [n for n in divisors(batch_sequences * share // (data * z)) if n not in seen]
        seen.update(counts)
        if counts:
            ways.append((share, counts))
    if ways:
        return ways
    if asked == 1:
        return str(_why_not_batch(grid, batch_sequences))
    why = f": {workload.not_shared}" if workload.not_shared else ""
    words = "no number of" if asked == "auto" else f"{asked}"
    return (
        f"{words} ranks of z={z} can share sequences of {length} tokens so that data*z={data * z} divides the global batch of "
        f"{batch_sequences}{why}"
    )


def _why_not_packed(w: Workload, y: int, x: int) -> str | None:
    """Have the ranks of an axis whole blocks of the rows of weights in NF4?"""
    of_axis = (("y", y, w.hidden), ("x", x, w.q_features), ("x", x, w.ffn))
    for axis, ranks, features in of_axis if w.quantization == "nf4" else ():
        if features % (ranks * BLOCK):
            return f"{axis}={ranks} does not divide {features} input features into whole blocks of {BLOCK} for NF4; use a smaller {axis}"
    return None


def why_not_experts(w: Workload, experts: ExpertsLayout, grid: tuple[int, int, int, int]) -> str | None:
    """Why experts cannot be so on this grid; None if they can, and also where that is what they are in any case."""
    _, z, y, x = grid
    if w.experts is None:
        return None
    e, owners = w.experts, owners_of(experts, z, y, x)
    if owners is not None and e.number % owners.ranks:
        over = "*".join(owners.axes)
        return f"{over}={owners.ranks} does not divide the {e.number} experts, so ranks cannot own whole ones"
    if owners is not None and "x" in owners.axes:
        return _undivided("y", y, e.features, f"the {e.features} inner features of an expert")
    return _undivided("x*y", x * y, e.features, f"the {e.features} inner features of an expert")


def _undivided(axis: str, ranks: int, size: int, name: str) -> str | None:
    if size % ranks == 0:
        return None
    return f"{axis}={ranks} does not divide {name}; use {axis} <= {_below(size, ranks)}"


def _below(n: int, limit: int) -> int:
    return max(d for d in divisors(n) if d <= limit)


def search(
    prices: Prices,
    ranks: int,
    global_batch_sequences: int,
    *,
    weights: Literal["fsdp2", "streamed"] = "fsdp2",
    checkpointing: tuple[ActivationCheckpointing, ...] = KINDS,
    checkpointed_blocks: int | None = None,
    activations: tuple[Activations, ...] = ("replicated", "sequence-parallel"),
    keep_inputs: tuple[bool, ...] = (True, False),
    keep_bytes: int | None = None,
    accumulation: tuple[Accumulation, ...] = ACCUMULATION,
    activation_offloading: bool = False,
    experts: tuple[ExpertsLayout, ...] = EXPERTS,
    sequence_ranks: int | Literal["auto"] = 1,
    reserve: float = RESERVE,
) -> Plan:
    """All layouts, the fastest first.

    ``reserve`` is the part of the memory that is left free. Of the kinds of ``checkpointing`` each layout has as little as fits. Streamed weights are tried with none, half and all of them kept, unless ``keep_bytes`` says how much.
    Sequence-parallel ``activations`` are tried where there are tensor ranks, with gathered inputs that are kept and that are
    gathered again (``keep_inputs``). Gradients of several micro-batches are added up whole, and in shards. ``experts`` of a mixture are gathered, and owned. Grids with more than `_MOST_TENSOR_RANKS` on y and x together are skipped.
    So many ``sequence_ranks`` share a sequence; "auto": as few as allow each number of micro-batches.
    """
    workload, cluster, length = prices.workload, prices.cluster, prices.length
    limit_bytes = memory_limit_bytes(cluster, reserve)
    ranked: list[Estimate] = []
    rejected: list[Rejected] = []
    for grid in factorisations(ranks):
        data, z, y, x = grid
        if x * y > _MOST_TENSOR_RANKS:
            continue
        reason = why_not_grid(workload, grid, None)
        shares = ways_to_share(workload, grid, global_batch_sequences, length, sequence_ranks)
        if reason is not None or isinstance(shares, str):
            rejected.append(Rejected(Layout(data, z, y, x, weights=weights), reason or str(shares)))
            continue
        gathered_bytes = int(workload.weight_bytes(WORK_BYTES) * workload.layers * prices.shard(y, x).block)
        keeps = (0, gathered_bytes // 2, gathered_bytes) if keep_bytes is None else (keep_bytes,)
        keeps = keeps if weights == "streamed" and z > 1 else (0,)
        ways_of_experts: list[ExpertsLayout] = []
        for way_of_experts in experts if workload.experts else ("cut",):
            of_grid = owners_of(way_of_experts, z, y, x)
            if way_of_experts != "cut" and (of_grid is None or of_grid.axes != way_of_experts):
                continue  # it is what another one is
            if (why := why_not_experts(workload, way_of_experts, grid)) is None:
                ways_of_experts.append(way_of_experts)
            else:
                rejected.append(Rejected(Layout(data, z, y, x, weights=weights, experts=way_of_experts), why))
        for share, counts in shares:
            undivided = undivided_axis(length // share, y, x)
            # (activations, are gathered inputs kept)
            ways: list[tuple[Activations, bool]] = []
            if "replicated" in activations or x * y == 1:
                ways.append(("replicated", True))
            if "sequence-parallel" in activations and x * y > 1 and undivided is None:
                ways += [("sequence-parallel", keep) for keep in keep_inputs]
            if prices.schedule.float8:
                for way in list(ways):
                    by_tokens = way[0] == "sequence-parallel"
                    reason = why_not_float8(groups_of(workload, y, x, by_tokens=by_tokens), y, x)
                    if reason is not None:
                        ways.remove(way)
                        rejected.append(
                            Rejected(Layout(data, z, y, x, weights=weights, activations=way[0]), reason)
                        )
            for micro_batches in counts:
                tokens = global_batch_sequences * length // (data * z * micro_batches)
                if undivided is not None and "sequence-parallel" in activations:
                    layout = Layout(
                        data,
                        z,
                        y,
                        x,
                        micro_batches,
                        "none",
                        0,
                        weights,
                        "sequence-parallel",
                        sequence_ranks=share,
                    )
                    axis, axis_ranks = undivided
                    reason = f"{axis}={axis_ranks} does not divide the {length // share} tokens of a sequence, so they cannot be sharded"
                    rejected.append(Rejected(layout, reason))
                ways_to_add_up = accumulation if micro_batches > 1 and z > 1 else accumulation[:1]
                for (kind, keeps_inputs), kept_bytes, adds_up, held in product(
                    ways, keeps, ways_to_add_up, ways_of_experts
                ):
                    layout = Layout(
                        data,
                        z,
                        y,
                        x,
                        micro_batches,
                        "none",
                        kept_bytes,
                        weights,
                        kind,
                        keeps_inputs,
                        checkpointed_blocks,
                        adds_up,
                        activation_offloading,
                        held,
                        share,
                    )
                    layout, peak = least_recomputed(
                        layout,
                        checkpointing,
                        workload.layers,
                        partial(prices.memory, tokens=tokens),
                        limit_bytes,
                    )
                    over = too_large(layout, peak.total_bytes, cluster, reserve)
                    if over is not None:
                        rejected.append(over)
                    else:
                        ranked.append(estimate_with(prices, layout, global_batch_sequences, peak))
    ranked.sort(key=lambda e: e.step_s)
    return Plan(ranked, rejected, ranks, memory_limit_bytes(cluster, reserve))


def least_recomputed(
    layout: Layout,
    kinds: Sequence[ActivationCheckpointing],
    blocks: int,
    memory_of: Callable[[Layout], Memory],
    limit_bytes: float,
) -> tuple[Layout, Memory]:
    """The layout with as little recomputation, of these kinds, as fits into the memory; with the most of it if none fits."""

    def with_kind(kind: ActivationCheckpointing, count: int | None) -> tuple[Layout, Memory]:
        found = replace(layout, activation_checkpointing=kind, checkpointed_blocks=count)
        return found, memory_of(found)

    over_bytes = 0.0  # of all blocks of the kind before
    for before, kind in zip([None, *kinds], kinds, strict=False):
        given = layout.checkpointed_blocks
        best = with_kind(kind, given)
        if best[1].total_bytes > limit_bytes:
            over_bytes = best[1].total_bytes - limit_bytes
            continue
        if given is None and before is not None and before == weaker(kind):
            # All blocks of the weaker kind are too much, all of this one fit: as few of them as possible.
            too_few, enough, tries = 0, blocks, 0
            while enough - too_few > 1:
                middle = (too_few + enough) // 2
                if tries < 2:  # memory is nearly linear in the number of blocks
                    spare_bytes = limit_bytes - best[1].total_bytes
                    share = over_bytes / (over_bytes + spare_bytes)
                    middle = too_few + math.ceil(share * (enough - too_few))
                    middle = min(max(middle, too_few + 1), enough - 1)
                tries += 1
                tried = with_kind(kind, middle)
                if tried[1].total_bytes > limit_bytes:
                    too_few, over_bytes = middle, tried[1].total_bytes - limit_bytes
                else:
                    enough, best = middle, tried
        return best
    return best


def memory_limit_bytes(cluster: Cluster, reserve: float) -> float:
    return cluster.device.memory_gib * 2**30 * (1 - reserve)


def too_large(
    layout: Layout, total_bytes: float, cluster: Cluster, reserve: float, source: str = ""
) -> Rejected | None:
    """The layout with both values and the way out if it does not fit."""
    limit_bytes = memory_limit_bytes(cluster, reserve)
    if total_bytes <= limit_bytes:
        return None
    reason = (
        f"needs {total_bytes / 2**30:.1f} GiB of {limit_bytes / 2**30:.1f} (a reserve of {reserve:.0%} is left); "
        f"use more z, y or x, more micro-batches, or recompute activations{source}"
    )
    return Rejected(layout, reason, total_bytes - limit_bytes)
