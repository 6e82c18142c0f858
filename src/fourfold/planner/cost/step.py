"""Time of a training step: its blocks one after another, and the communication on z and data that does not overlap them.

    forward    the gather of a block's weights over z overlaps the block before; the first gather is exposed
    backward   the second gather of the next block, the reduce-scatter over z of the previous block, and its all-reduce
               over data overlap a block's backward (and recomputed forward); the last ones are exposed
    step       the optimizer reads and writes every shard once

Link time is what collectives take, exposed time the part of it that makes the step longer; they are kept apart. All values
are predictions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from fourfold.mesh.axes import AXES
from fourfold.optim.kinds import Optimizer
from fourfold.parallel.checkpointing import ActivationCheckpointing
from fourfold.planner.cost.block import Pass, block_passes, ends_pass, together_s
from fourfold.planner.cost.collective import Kind, collective_s
from fourfold.planner.cost.compute import Kernels, host_copy_s, memory_s
from fourfold.planner.cost.elementwise import CLIP_BYTES, copied_bytes, optimizer_bytes
from fourfold.planner.cost.experts import OWNED_BYTES
from fourfold.planner.cost.linears import Given
from fourfold.planner.cost.memory import Memory, memory
from fourfold.planner.cost.optimizer import OptimizerTime, muon_time
from fourfold.planner.cost.sequences import moved_by_block
from fourfold.planner.cost.shard import ShardSizes, sent_bytes, shard_of
from fourfold.planner.inputs.cluster import Cluster, Device
from fourfold.planner.inputs.experts import Owners, load_of, owners_of
from fourfold.planner.inputs.layout import FOURFOLD, ExpertsLayout, Layout, Schedule
from fourfold.planner.inputs.workload import Workload


@dataclass(frozen=True)
class Estimate:
    """A prediction for one layout; seconds of one step, bytes of one rank."""

    layout: Layout
    step_s: float
    compute_s: dict[str, float]  # by part; of copies to the host what shows
    link_s: dict[str, float]  # by axis: what collectives take
    exposed_s: dict[str, float]  # by axis: what of it shows
    memory: Memory
    tokens_per_s: float
    mfu: float | None  # None: the device's peak is not known
    hfu: float | None
    is_simulated: bool = False  # event by event over a dry run, whose memory it has; else by the closed forms
    formula_s: float | None = None  # the closed forms' step, where this one is simulated

    @property
    def limited_by(self) -> str:
        """The part that takes the longest: a kind of computation, or an axis whose communication shows."""
        parts = {**self.compute_s, **{f"{axis} communication": s for axis, s in self.exposed_s.items()}}
        return max(parts, key=parts.__getitem__)


P = ParamSpec("P")
T = TypeVar("T")


def _remembered(method: Callable[Concatenate[Any, P], T]) -> cached_property[Callable[P, T]]:
    """A method that computes each result once for an object."""
    return cached_property(lambda self: functools.cache(functools.partial(method, self)))  # type: ignore[arg-type, return-value]


@dataclass(frozen=True)
class Prices:
    """The cost functions of one workload on one cluster, with cached results."""

    workload: Workload
    cluster: Cluster
    length: int
    schedule: Schedule = FOURFOLD
    kernels: Kernels | None = None
    optimizer: Optimizer = "adamw"
    expert_load: float | Literal["worst"] = (
        1.0  # rows of the owner of experts with most, as a multiple of the mean
    )

    @_remembered
    def collective_s(self, kind: Kind, payload_bytes: float, ranks: int, inner_ranks: int) -> float:
        return collective_s(kind, payload_bytes, ranks, inner_ranks, self.cluster)

    @_remembered
    def shard(self, y: int, x: int, experts: ExpertsLayout = "cut") -> ShardSizes:
        return shard_of(self.workload, y, x, experts)

    @_remembered
    def passes(
        self,
        tokens: float,
        y: int,
        x: int,
        activations: str = "replicated",
        keep_inputs: bool = True,
        owners: Owners | None = None,
        *,
        is_dense: bool = False,
    ) -> tuple[Pass, Pass, Pass, Pass]:
        """A block's forward, its backward, its forward in backward, and embedding, head and loss.

        With experts it is a sparse block, unless ``is_dense``.
        """
        w, schedule = self.workload, self.schedule
        if w.experts is not None and is_dense:
            w = w.dense
        if owners is not None and schedule.elementwise == "compiled":
            schedule = replace(
                schedule, elementwise="eager"
            )  # blocks whose experts ranks own are not compiled

        def send(kind: Kind, axis: str, payload_bytes: float) -> float:
            if axis == "experts":
                assert owners is not None
                return self.collective_s(kind, payload_bytes, owners.ranks, owners.inner)
            return self.collective_s(kind, payload_bytes, *((x, 1) if axis == "x" else (y, x)))

        timing = (self.cluster.device, self.kernels or Kernels(), schedule, self.cluster.slowdown)
        by_tokens = activations == "sequence-parallel"
        load = 1.0 if w.experts is None else load_of(w.experts, owners, self.expert_load)
        given = Given(tokens, y, x, *timing, send, by_tokens, keep_inputs, owners, load)
        return *block_passes(w, self.length, given), ends_pass(w, given)

    def owners(self, layout: Layout) -> Owners | None:
        return owners_of(layout.experts, layout.z, layout.y, layout.x) if self.workload.experts else None

    @cached_property
    def _of_shared_sequences(self) -> Prices:
        """Their blocks are not compiled."""
        schedule = self.schedule
        if schedule.elementwise == "compiled":
            schedule = replace(schedule, elementwise="eager")
        return replace(self, schedule=schedule)

    def of(self, layout: Layout) -> Prices:
        return self._of_shared_sequences if layout.sequence_ranks > 1 else self

    def memory(self, layout: Layout, tokens: float) -> Memory:
        shard = self.shard(layout.y, layout.x, layout.experts)
        work_bytes = self.schedule.weight_bytes
        return memory(
            self.workload,
            layout,
            tokens,
            shard,
            work_bytes,
            self.optimizer,
            length=self.length,
            expert_load=self._load(layout),
        )

    def _load(self, layout: Layout) -> float:
        experts = self.workload.experts
        return 1.0 if experts is None else load_of(experts, self.owners(layout), self.expert_load)

    @_remembered
    def optimizer_time(
        self, data: int, z: int, y: int, x: int, experts: ExpertsLayout = "cut"
    ) -> OptimizerTime:
        """The optimizer's step on a grid, clipping included."""
        layout = Layout(data, z, y, x)
        w, shard, device = self.workload, self.shard(layout.y, layout.x, experts), self.cluster.device
        over = layout.z * (layout.data if self.schedule.optimizer_over_data else 1)
        stored = (w.layers * (shard.trained.block + shard.trained.owned) + shard.trained.outside) / over
        by_muon, muon = 0.0, OptimizerTime(0.0, dict.fromkeys(AXES, 0.0))
        if self.optimizer == "muon":
            by_muon = w.layers * shard.matrices / layout.z
            muon = muon_time(w, layout, device, self.kernels or Kernels(), self.collective_s)
        adamw = optimizer_bytes(self.schedule.fused_optimizer, widens=self.optimizer == "adamw-bf16")
        moved = adamw * (stored - by_muon) + CLIP_BYTES * by_muon
        return muon._replace(compute_s=muon.compute_s + memory_s(moved, device))

    def tokens_at_once(self, layout: Layout, global_batch_sequences: int) -> float:
        """Tokens of one rank's micro-batch."""
        return global_batch_sequences / (layout.data * layout.z * layout.micro_batches) * self.length


class BlockTimes(NamedTuple):
    """The passes of blocks that are recomputed alike."""

    blocks: int
    forward: Pass
    backward: Pass
    again: Pass | None  # what is recomputed


def block_times(prices: Prices, layout: Layout, tokens: float) -> list[BlockTimes]:
    found: list[BlockTimes] = []
    owners = prices.owners(layout)
    for kind, count, is_dense in _kinds_of_blocks(prices.workload, layout):
        keep_inputs = layout.keep_inputs and (kind != "selective" or not layout.by_tokens)
        forward, backward, again, _ = prices.passes(
            tokens, layout.y, layout.x, layout.activations, keep_inputs, owners, is_dense=is_dense
        )
        # Selective: only what lies between the linears, and FlexAttention, unless the block is one graph.
        is_kept = not prices.workload.is_flex or prices.schedule.elementwise == "compiled"
        attention_s = 0.0 if is_kept else forward.attention_s
        between = Pass(0.0, attention_s, forward.elementwise_s, {"x": 0.0, "y": 0.0}, {"x": 0.0, "y": 0.0})
        chosen = {"none": None, "selective": between, "full": again}[kind]
        found.append(BlockTimes(count, forward, backward, chosen))
    return found


def _kinds_of_blocks(
    workload: Workload, layout: Layout
) -> Iterator[tuple[ActivationCheckpointing, int, bool]]:
    """(what is recomputed, number of blocks, are they dense), from the first block to the last: dense ones come first."""
    dense = workload.layers - workload.sparse_layers
    for kind, count in layout.checkpointing_of(workload.layers):
        first = min(dense, count)
        dense -= first
        if first:
            yield kind, first, True
        if count > first:
            yield kind, count - first, False


def estimate_with(
    prices: Prices, layout: Layout, global_batch_sequences: int, peak: Memory | None = None
) -> Estimate:
    """Time and memory of one step of this layout; ``peak`` is its memory, if that is known already.

    Example:
        >>> from fourfold.planner.inputs.cluster import preset
        >>> prices = Prices(Workload("8b", 4096, 14336, 32, 32, 8, 128, 128256), preset("dgx-h100"), 8192)
        >>> alone, wide = (estimate_with(prices, layout, 16) for layout in (Layout(1, 8, 1, 1), Layout(1, 1, 1, 8)))
        >>> alone.step_s < wide.step_s  # eight sequences leave enough work to hide the weights of 8B
        True
    """
    prices = prices.of(layout)
    w, device = prices.workload, prices.cluster.device
    tokens = prices.tokens_at_once(layout, global_batch_sequences)
    blocks = block_times(prices, layout, tokens)
    *_, ends = prices.passes(
        tokens, layout.y, layout.x, layout.activations, layout.keep_inputs, prices.owners(layout)
    )
    shard = prices.shard(layout.y, layout.x, layout.experts)
    weights_link_s, weights_exposed_s = _weights(prices, layout, shard, blocks)

    m = layout.micro_batches
    optimizer = prices.optimizer_time(*layout.grid, layout.experts)
    compute_s = {
        "matmul": m
        * (sum(b.blocks * (b.forward.matmul_s + b.backward.matmul_s) for b in blocks) + ends.matmul_s),
        "attention": m * sum(b.blocks * (b.forward.attention_s + b.backward.attention_s) for b in blocks),
        "element-wise": m
        * (
            sum(b.blocks * (b.forward.elementwise_s + b.backward.elementwise_s) for b in blocks)
            + ends.elementwise_s
        )
        + _copies_s(prices, layout, shard),
        "recomputation": m * sum(b.blocks * b.again.compute_s for b in blocks if b.again),
        "optimizer": optimizer.compute_s,
        "host copies": m * _host_copies_s(prices, layout, tokens, blocks),
    }
    passes = [(b.blocks, one) for b in blocks for one in (b.forward, b.backward, b.again) if one] + [
        (1, ends)
    ]
    link_s: dict[str, float] = {
        axis: m * sum(n * p.link_s.get(axis, 0.0) for n, p in passes) for axis in AXES
    }
    exposed_s: dict[str, float] = {
        axis: m * sum(n * p.exposed_s.get(axis, 0.0) for n, p in passes) for axis in AXES
    }
    for axis in ("z", "data"):
        link_s[axis] += weights_link_s[axis]
        exposed_s[axis] += weights_exposed_s[axis]
    if layout.sequence_ranks > 1:
        sent_s, *shared_s = _shared_s(prices, layout, tokens, blocks)
        link_s["z"] += m * sent_s
        exposed_s["z"] += m * sent_s
        for part, seconds in zip(("element-wise", "recomputation"), shared_s, strict=True):
            compute_s[part] += m * seconds
    for axis, sent_s in optimizer.link_s.items():  # nothing hides it
        link_s[axis] += sent_s
        exposed_s[axis] += sent_s
    step_s = sum(compute_s.values()) + sum(exposed_s.values())
    all_tokens = float(global_batch_sequences) * prices.length
    mfu, hfu = utilisation(w, layout, device, all_tokens, prices.length, step_s)
    peak = peak or prices.memory(layout, tokens)
    return Estimate(layout, step_s, compute_s, link_s, exposed_s, peak, all_tokens / step_s, mfu, hfu)


def utilisation(
    workload: Workload | None, layout: Layout, device: Device, tokens: float, length: int, step_s: float
) -> tuple[float | None, float | None]:
    """(MFU, HFU) of a step of N tokens; None where the device's peak, or the model's FLOPs, are not known."""
    if workload is None or device.spec_tflops is None:
        return None, None
    possible = step_s * layout.ranks * device.spec_tflops * 1e12
    full = sum(blocks for kind, blocks in layout.checkpointing_of(workload.layers) if kind == "full")
    hardware = workload.hardware_flops(
        tokens, length, again=full * workload.share_before_last_product(length)
    )
    return workload.model_flops(tokens, length) / possible, hardware / possible


def _copies_s(prices: Prices, layout: Layout, shard: ShardSizes) -> float:
    """Weights that are copied twice in each micro-batch, those outside of blocks once; gradients in each."""
    gathered, gradient = copied_bytes(layout, prices.schedule.elementwise)
    blocks = prices.workload.layers * shard.block
    moved = gathered * (2 * blocks + shard.outside) + gradient * (blocks + shard.outside)
    if prices.workload.lora_rank:
        blocks *= _sent_bytes(prices, shard) / (prices.schedule.weight_bytes * shard.block)
        moved = gathered * (2 * blocks + shard.outside) + gradient * prices.workload.layers * shard.adapters
    if prices.schedule.elementwise != "fused":
        moved += OWNED_BYTES * prices.workload.layers * shard.owned / layout.z
    return memory_s(layout.micro_batches * moved, prices.cluster.device)


def _shared_s(
    prices: Prices, layout: Layout, tokens: float, blocks: Sequence[BlockTimes]
) -> tuple[float, float, float]:
    """Keys and values of shared sequences in a micro-batch: (collectives, copies, copies in what is recomputed)."""
    moved = moved_by_block(prices.workload, layout, tokens, prices.schedule.weight_bytes)
    place = (layout.sequence_ranks, layout.y * layout.x)
    gather_s = prices.collective_s("all_gather", moved.gathered, *place)
    scatter_s = prices.collective_s("reduce_scatter", moved.scattered, *place)
    # A selective block keeps attention's output.
    again = sum(b.blocks for b in blocks if b.again is not None and b.again.matmul_s)
    count, device = sum(b.blocks for b in blocks), prices.cluster.device
    return (
        count * (2 * gather_s + scatter_s) + again * gather_s,
        count * memory_s(moved.forward + moved.backward, device),
        again * memory_s(moved.forward, device),
    )


def _host_copies_s(prices: Prices, layout: Layout, tokens: float, blocks: Sequence[BlockTimes]) -> float:
    """What shows of the copies of block inputs: each way one overlaps with a pass of a block, and the last one is not waited for."""
    recomputed = [b for b in blocks if b.again]
    count = sum(b.blocks for b in recomputed)
    if not layout.activation_offloading or not count:
        return 0.0
    features = prices.workload.hidden / layout.y / (layout.x if layout.by_tokens else 1)
    copy_s = host_copy_s(prices.schedule.weight_bytes * tokens * features, prices.cluster.device)

    def shows(*passes: Pass | None) -> float:
        return max(0.0, copy_s - sum(p.compute_s + sum(p.exposed_s.values()) for p in passes if p))

    shown_s = sum(b.blocks * (shows(b.forward) + shows(b.backward, b.again)) for b in recomputed)
    return shown_s * (count - 1) / count


# -- weights on z, gradients on z and data ----------------------------------------------------------------------------


def _sent_bytes(prices: Prices, shard: ShardSizes) -> float:
    return sent_bytes(prices.workload, shard, prices.schedule.weight_bytes)


class _Traffic(NamedTuple):
    """Seconds of one block's collectives, and of those of what is in no block."""

    gather_s: float
    scatter_s: float
    data_s: float
    outside_gather_s: float
    outside_scatter_s: float
    outside_data_s: float
    calls: int  # collectives of a block each way


def _traffic(prices: Prices, layout: Layout, shard: ShardSizes) -> _Traffic:
    w, schedule, inner = prices.workload, prices.schedule, layout.y * layout.x
    data_bytes = schedule.data_bytes or schedule.gradient_bytes

    def each(
        gathered_bytes: float, trained: float, calls: int, owned: float = 0.0
    ) -> tuple[float, float, float]:
        gather = prices.collective_s("all_gather", gathered_bytes / calls, layout.z, inner)
        if not trained:
            return calls * gather, 0.0, 0.0
        part = trained / calls
        scatter = prices.collective_s("reduce_scatter", schedule.gradient_bytes * part, layout.z, inner)
        part += owned / calls
        data = prices.collective_s("all_reduce", data_bytes * part / layout.z, layout.data, inner * layout.z)
        return calls * gather, calls * scatter, calls * data

    # FSDP2 sends a block's weights together, streamed weights go matrix by matrix; embedding and head are two more.
    calls = len(w.block_matrices) - (shard.owned > 0) if layout.weights == "streamed" else 1
    trained = shard.trained
    return _Traffic(
        *each(
            _sent_bytes(prices, shard) + schedule.weight_bytes * shard.adapters,
            trained.block,
            calls,
            trained.owned,
        ),
        *each(schedule.weight_bytes * shard.outside, trained.outside, 2),
        calls,
    )


def _weights(
    prices: Prices, layout: Layout, shard: ShardSizes, times: Sequence[BlockTimes]
) -> tuple[dict[str, float], dict[str, float]]:
    """(link, exposed) seconds of weights and gradients, on z and on data."""
    schedule, slowdown = prices.schedule, prices.cluster.slowdown
    blocks, m = prices.workload.layers, layout.micro_batches
    # Micro-batches whose gradients are sent, over z and over data.
    sends_data = m if schedule.sends_every_micro_batch else 1
    sends = m if layout.accumulates_shards else sends_data
    t = _traffic(prices, layout, shard)
    # What waits for backward does not come again; the head, too, stays.
    kept = min(blocks, layout.keep_bytes / _sent_bytes(prices, shard))
    again_s = t.gather_s * (blocks - kept) / blocks
    link_z = m * (blocks * (t.gather_s + again_s) + t.outside_gather_s)
    link_z += sends * (blocks * t.scatter_s + t.outside_scatter_s)
    link_data = sends_data * (blocks * t.data_s + t.outside_data_s)

    overlap_forward_s = sum(t.blocks * _overlap_s(prices, layout, t.forward) for t in times) / blocks
    overlap_backward_s = (
        sum(
            t.blocks
            * (
                _overlap_s(prices, layout, t.backward)
                + (_overlap_s(prices, layout, t.again) if t.again else 0.0)
            )
            for t in times
        )
        / blocks
    )

    def shows(compute_s: float, communication_s: float) -> float:
        return together_s(compute_s, communication_s, slowdown) - compute_s if communication_s else 0.0

    # Forward: every block's gather but the first overlaps the block before it.
    if schedule.gathers_ahead:
        # The embedding's is exposed, too; the head's overlaps the last blocks.
        first_s = t.gather_s / t.calls + t.outside_gather_s / 2
        exposed_z = m * ((blocks - 1) * shows(overlap_forward_s, t.gather_s) + first_s)
    else:
        exposed_z = m * (blocks * t.gather_s + t.outside_gather_s)
    exposed_data = 0.0 if schedule.hides_data else link_data
    # Backward, of micro-batches that send their gradients over both axes, over z, and over none.
    passes = (
        (sends_data, t.scatter_s, t.data_s),
        (sends - sends_data, t.scatter_s, 0.0),
        (m - sends, 0.0, 0.0),
    )
    for count, scatter_s, data_s in passes:
        hidden_s = again_s * schedule.gathers_ahead + scatter_s * schedule.hides_scatters
        alone_s = again_s + scatter_s - hidden_s
        data_s *= schedule.hides_data
        if _share_links(prices, layout):
            shown_s = shows(overlap_backward_s, hidden_s + data_s)
            of_data = data_s / (hidden_s + data_s) if data_s else 0.0
        else:
            shown_s = shows(overlap_backward_s, max(hidden_s, data_s))
            of_data = float(data_s > hidden_s)
        exposed_z += count * blocks * (alone_s + shown_s * (1 - of_data))
        exposed_data += count * blocks * shown_s * of_data
    # The last of a block, and what is outside, have nothing left to overlap with: the embedding comes last.
    exposed_z += sends * (t.scatter_s / t.calls * schedule.hides_scatters + t.outside_scatter_s)
    exposed_data += sends_data * (t.data_s / t.calls + t.outside_data_s) * schedule.hides_data
    link_s = {"z": link_z, "data": link_data}
    return link_s, {"z": min(exposed_z, link_z), "data": min(exposed_data, link_data)}


def _leaves_node(prices: Prices, ranks: int, inner: int) -> bool:
    return ranks > 1 and ranks * inner > prices.cluster.links.devices_per_node


def _share_links(prices: Prices, layout: Layout) -> bool:
    """Do z and data send over the same kind of link? Then one follows the other; else they run in parallel."""
    inner = layout.y * layout.x
    return _leaves_node(prices, layout.z, inner) == _leaves_node(prices, layout.data, inner * layout.z)


def _overlap_s(prices: Prices, layout: Layout, one: Pass) -> float:
    """The time of a pass that the weights' traffic can overlap: without activations' traffic on the same links."""
    inner = layout.y * layout.x
    weights_leave = _leaves_node(prices, max(layout.z, layout.data), inner)
    seconds = one.compute_s
    if _leaves_node(prices, layout.x, 1) != weights_leave:
        seconds += one.exposed_s["x"]
    if _leaves_node(prices, layout.y, layout.x) != weights_leave:
        seconds += one.exposed_s["y"]
    return seconds
