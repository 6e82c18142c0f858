"""Peak memory of a rank in closed form, by category.

The peak is one of a few moments: the loss (all activations, the logits), a block of backward (what is left of the
activations, the gradients so far, a block in work), the gradient of the embedding, the optimizer's step. What is held then
is counted as the engine holds it (`weights/streamed.py`, `weights/api.py`, FSDP2): fp32 shards, gradients and moments;
bf16 blocks gathered over z. `tests/planner/cost/test_memory.py` compares it with the dry run, which counts every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from fourfold.optim.kinds import PART, Optimizer
from fourfold.parallel.checkpointing import ActivationCheckpointing
from fourfold.parallel.loss.chunk_size import chunk_tokens, gradient_rows, piece_tokens
from fourfold.planner.cost.kept import (
    WIDE_BYTES,
    experts_kept,
    kept_bytes_per_token,
    norm_bytes,
    saved_bytes_per_token,
)
from fourfold.planner.cost.optimizer import (
    ADAMW_STATE_BYTES,
    MUON_STATE_BYTES,
    muon_matrices,
    muon_step_bytes,
)
from fourfold.planner.cost.sequences import held_in_backward
from fourfold.planner.cost.shard import ShardSizes, sent_bytes, shard_of
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload
from fourfold.weights.quantization import BYTES_BETWEEN, UNPACKED_AT_ONCE

MASTER_BYTES = 4
STEP_BYTES = 4  # beside Muon, AdamW makes one temporary of every shard; alone it is fused
GRADIENT_BYTES = 4
WORK_BYTES = 2  # bf16, unless the work is in fp32

# In addition to its logits the stock loss of a single rank holds an fp32 copy and a temporary, and its gradient in the precision of
# the work. Otherwise the loss has a chunk of the logits, and a piece of it in fp32 (parallel/loss/chunked.py).
STOCK_LOSS_BYTES = 10
# Backward of a norm, for each feature: the gradient in fp32 and three products of it; in the precision of the work the
# gradients of its output and of the residual stream.
NORM_BACKWARD_WIDE, NORM_BACKWARD_COPIES = 4, 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the moment of its peak."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    gathered_bytes: float
    buffers_bytes: float
    logits_bytes: float
    moment: str

    @property
    def total_bytes(self) -> float:
        return float(sum(size for name, size in vars(self).items() if name != "moment"))


def memory(
    workload: Workload,
    layout: Layout,
    tokens: float,
    shard: ShardSizes | None = None,
    work_bytes: int = WORK_BYTES,
    optimizer: Optimizer = "adamw",
    *,
    length: int,
    expert_load: float = 1.0,
) -> Memory:
    """The peak of a rank that processes ``tokens`` at a time in sequences of ``length``, by category; of owners of experts the one with
    ``expert_load`` times the mean rows."""
    shard = shard or shard_of(workload, layout.y, layout.x, layout.experts)
    moments = _moments(workload, layout, tokens, shard, work_bytes, optimizer, length, expert_load)
    return Memory(*max(moments, key=lambda moment: sum(moment[:-1])))


class _InWork(NamedTuple):
    """Activations of blocks that are recomputed alike, in bytes; of dense and sparse blocks ``each`` is the mean."""

    each: float  # of every block until backward comes to it
    live: float  # in addition of the one that backward is in
    in_work: tuple[
        tuple[float, float], ...
    ]  # gradients and temporaries, with elements of weights whose gradients are there by then


def _in_work(
    w: Workload,
    layout: Layout,
    tokens: float,
    kind: ActivationCheckpointing,
    work_bytes: int,
    length: int,
    shard: ShardSizes,
    expert_load: float,
) -> _InWork:
    if w.experts is None:
        return _of_dense(w, layout, tokens, kind, work_bytes, length, shard)
    of_experts = experts_kept(w, layout, work_bytes, expert_load)
    if kind == "selective":
        layout = replace(layout, keep_inputs=False)
    hidden = tokens * w.hidden / layout.y / (layout.x if layout.by_tokens else 1)
    saved = tokens * saved_bytes_per_token(w, layout, work_bytes, length, expert_load)
    kept = tokens * kept_bytes_per_token(w, layout, work_bytes, expert_load)
    waiting = 0.0 if layout.activation_offloading else work_bytes * hidden
    each = {"none": saved, "selective": waiting + kept, "full": waiting}[kind]
    live = {"none": 0.0, "selective": saved - kept, "full": saved}[kind]
    block_gradient = 2 * work_bytes * hidden
    elements = shard.gathered_experts + shard.owned / layout.z * w.layers / w.sparse_layers
    most = (
        (block_gradient + tokens * of_experts.in_work, elements / (3 if w.gated else 2)),
        (block_gradient + tokens * of_experts.after, elements),
    )
    live += tokens * of_experts.again * (kind == "selective")
    if w.experts.dense_layers:
        share = w.experts.dense_layers / w.layers
        dense = _of_dense(w.dense, layout, tokens, kind, work_bytes, length, shard)
        each = share * dense.each + (1 - share) * each
    return _InWork(each, live, most)


def _of_dense(
    w: Workload,
    layout: Layout,
    tokens: float,
    kind: ActivationCheckpointing,
    work_bytes: int,
    length: int,
    shard: ShardSizes,
) -> _InWork:
    if kind == "selective":
        layout = replace(layout, keep_inputs=False)
    hidden_read, ffn_read = tokens * w.hidden / layout.y, tokens * w.ffn / layout.x
    hidden, ffn = hidden_read, ffn_read
    if layout.by_tokens:
        hidden, ffn = hidden / layout.x, ffn / layout.y
    saved = tokens * saved_bytes_per_token(w, layout, work_bytes, length)
    block_input = work_bytes * hidden
    kept = tokens * kept_bytes_per_token(w, layout, work_bytes)
    waiting = 0.0 if layout.activation_offloading else block_input
    each = {"none": saved, "selective": waiting + kept, "full": waiting}[kind]
    live = {"none": 0.0, "selective": saved - kept, "full": saved}[kind]
    # The gradients of a block's output, of the down projection's input and of what the activation function took; or,
    # after the MLP, whose activations are freed by then, those of a norm.
    mlp = work_bytes * (hidden + 2 * ffn)
    norm = (4 * NORM_BACKWARD_WIDE + NORM_BACKWARD_COPIES * work_bytes) * hidden
    after_mlp = norm - work_bytes * (w.activation_copies * ffn + hidden)
    if layout.by_tokens:
        # The gradient of the block's output, the same gathered, and all of that of the down projection's input.
        again = 0 if layout.keep_inputs else 1
        mlp = work_bytes * (hidden + hidden_read + ffn + ffn_read * (1 + again))
        if w.gated and layout.y > 1:
            # Or, what the MLP kept being gone, the gradients of gate and up: together, gathered, and gathered each for itself.
            gone = (w.activation_copies - 1) * ffn + (ffn if again else ffn_read)
            siblings = hidden + 2 * ffn + 4 * ffn_read + hidden_read * (1 + again)
            mlp = max(mlp, work_bytes * (siblings - gone))
    most = max((after_mlp, 3 if w.gated else 2), (mlp, 1))
    if (
        layout.sequence_ranks > 1
    ):  # the gradients of attention's output and of the queries, and those of all keys
        parts = layout.x * layout.y if layout.by_tokens and w.divides_heads(layout.x * layout.y) else layout.x
        whole = held_in_backward(w, layout, tokens, work_bytes, length)
        gone = work_bytes * w.activation_copies * ffn
        attention = work_bytes * (hidden + 2 * tokens * w.q_features / parts) + whole - gone
        most = max(most, (attention, 3 if w.gated else 2))
    if w.norm_after_mlp:  # comes before the MLP in backward
        most = max(most, (norm, 0))
    in_work, matrices = most
    return _InWork(each, live, ((in_work, matrices * shard.trained.inner),))


def _moments(
    w: Workload,
    layout: Layout,
    tokens: float,
    shard: ShardSizes,
    work_bytes: int,
    optimizer: Optimizer,
    length: int,
    expert_load: float = 1.0,
) -> Iterator[tuple[float, float, float, float, float, float, float, str]]:
    """The fields of `Memory` at each moment that may be the peak. A search looks at millions of them, so they are tuples."""
    trained = shard.trained
    whole = w.layers * trained.block + trained.outside
    stored = (whole + w.layers * trained.owned) / layout.z
    element_bytes = (
        sent_bytes(w, shard, work_bytes) / shard.block
    )  # of a block's weights as they are gathered
    frozen_bytes = 0.0
    if w.lora_rank:
        frozen_bytes = (element_bytes * w.layers * shard.block + work_bytes * shard.outside) / layout.z
    cut = layout.y * layout.x > 1
    accumulates = layout.micro_batches > 1
    kinds = layout.checkpointing_of(w.layers)
    recomputed = sum(blocks for kind, blocks in kinds if kind != "none")
    is_recomputed = recomputed > 0
    offloaded = recomputed if layout.activation_offloading else 0
    is_streamed = layout.weights == "streamed"
    sends = layout.z * layout.data > 1
    by_muon = w.layers * shard.matrices / layout.z if optimizer == "muon" else 0.0
    parameters = MASTER_BYTES * stored + frozen_bytes  # frozen weights are stored as they are sent
    moments = ADAMW_STATE_BYTES[optimizer] * (stored - by_muon) + MUON_STATE_BYTES * by_muon

    def at(
        moment: str,
        gradients: float,
        activations: float = 0.0,
        gathered: float = 0.0,
        buffers: float = 0.0,
        logits: float = 0.0,
        state: float = moments,
    ) -> tuple[float, float, float, float, float, float, float, str]:
        return parameters, gradients, state, activations, gathered, buffers, logits, moment

    # What the linears read, gathered; and what is between them: the same, unless its tokens are cut as well.
    hidden_read = tokens * w.hidden / layout.y
    hidden = hidden_read / (layout.x if layout.by_tokens else 1)
    block_input = work_bytes * hidden
    works = {
        kind: _in_work(w, layout, tokens, kind, work_bytes, length, shard, expert_load) for kind, _ in kinds
    }
    last_norm = norm_bytes(w, cut, work_bytes) * hidden
    if layout.by_tokens:
        # After the last norm the model's code has a tensor of all tokens, and the head a gathered input.
        last_norm += 2 * work_bytes * hidden_read * (layout.x > 1)

    # Gathered weights. Whole on each rank and in the precision of the work, the shard is the block: nothing is gathered.
    is_block = work_bytes == MASTER_BYTES or bool(w.lora_rank)
    copied = 0 if is_streamed and layout.z == 1 and is_block else work_bytes
    in_blocks = element_bytes if copied else 0.0
    kept = min(layout.keep_bytes, in_blocks * w.layers * shard.block)
    unpacked = 0.0  # the numbers of the linear in use
    if w.quantization == "nf4":
        unpacked = work_bytes * shard.inner + BYTES_BETWEEN * min(UNPACKED_AT_ONCE, shard.inner)
    # FSDP2 has a last group for what is in no block, and no group of its own: gathered from the first forward to the end.
    in_root = not is_streamed and w.tied
    root = copied * shard.outside if in_root else 0.0
    # The head's gradient waits there for the embedding's.
    root_gradient = work_bytes * trained.table if in_root else 0.0
    buffers = 0.0
    if is_streamed:
        ahead = shard.inner + shard.q + shard.kv if is_recomputed else 3 * shard.inner
        at_loss = copied * shard.table + in_blocks * ahead + kept
        window = (
            shard.block if w.lora_rank else shard.largest
        )  # frozen weights stay until backward is in another block
        in_block = in_blocks * (shard.block + shard.q + 2 * shard.kv if is_recomputed else window) + kept
        in_last = in_blocks * (shard.block - shard.inner if is_recomputed else shard.largest)
        # Adapters are small weights, which are gathered together.
        adapters = work_bytes * w.layers * shard.adapters
        at_loss, in_block, in_last = at_loss + adapters, in_block + adapters, in_last + adapters
        if layout.z > 1 and not w.lora_rank:  # the shards that are being sent, in the precision of the work
            buffers = copied * (shard.inner + shard.q + 2 * shard.kv) / layout.z
    else:
        # FSDP2 keeps the buffer of the last gather in forward until the next; there is none on a z of one.
        gathers = layout.z > 1
        last_gather = in_blocks * shard.most if in_root else copied * shard.table
        at_loss = (root or copied * shard.table) + last_gather * gathers
        block = in_blocks * shard.most + copied * shard.adapters
        in_block = root + block * (2 if gathers else 1)
        in_last = root + block
    in_block, in_last = in_block + unpacked, in_last + unpacked
    # Casts of experts that ranks own: of one block; of those ahead, too, where the next micro-batch uses them.
    casts = work_bytes * trained.owned / layout.z * (1 if work_bytes < MASTER_BYTES else 0)
    in_last += casts
    of_owned = GRADIENT_BYTES * trained.owned / layout.z

    # The loss. Gradients that are added up over micro-batches are whole over z until they are sent.
    columns = -(-w.vocabulary // layout.x)
    added_up = GRADIENT_BYTES * (whole + w.layers * trained.owned / layout.z) if accumulates else 0.0
    if layout.accumulates_shards:
        # With replicas FSDP2 has ``.grad`` in addition, and streamed weights the shards of the micro-batch.
        of_all = w.layers * trained.owned / layout.z  # experts that ranks own have ``.grad`` alone
        added_up = GRADIENT_BYTES * (stored - of_all) * (2 if layout.data > 1 and not is_streamed else 1)
        added_up += GRADIENT_BYTES * of_all
    saved = sum(works[kind].each * blocks for kind, blocks in kinds) + last_norm
    if offloaded:  # the last input, which backward needs first
        saved += block_input
    if layout.ranks == 1:
        logits = (work_bytes + STOCK_LOSS_BYTES) * tokens * columns
        yield at("the loss", added_up, saved, at_loss, buffers, logits)
    elif w.whole_logits:
        rows = tokens / (layout.y if layout.by_tokens else 1)
        gradient = work_bytes if work_bytes < WIDE_BYTES else 0  # in fp32 it is written over the exponentials
        logits = (WIDE_BYTES + gradient + work_bytes * w.whole_logits) * rows * columns
        yield at("the loss", added_up, saved, at_loss, buffers, logits)
    else:
        size = chunk_tokens(w.vocabulary, layout.x, int(work_bytes))
        at_head = saved + work_bytes * hidden_read  # and the gradient of the head's input
        # In the first chunk, and in the second, with the gradient of the head so far. It is in fp32, and a part of it is computed at a time.
        wide = WIDE_BYTES * trained.table
        part = work_bytes * min(trained.table, gradient_rows(w.hidden // layout.y) * w.hidden / layout.y)
        for rows, so_far in ((min(tokens, size), 0.0), (min(tokens - size, size), wide)):
            if rows <= 0:
                continue
            own_rows = rows / (layout.y if layout.by_tokens else 1)
            # Their gradient is written over the logits. A piece is in fp32 in between. Ranks of y have sums of all, and then their own.
            in_fp32 = min(own_rows, piece_tokens(columns)) * WIDE_BYTES if work_bytes < WIDE_BYTES else 0.0
            sums = rows * work_bytes if own_rows < rows else 0.0
            logits = columns * (own_rows * work_bytes + max(in_fp32, sums))
            yield at("the loss", added_up + so_far, at_head, at_loss, buffers, logits)
            # Then the gradient of all of a chunk's logits, and that of the head by this chunk.
            by_chunk = added_up + (wide + part if tokens > size else work_bytes * trained.table)
            yield at("the head's gradient", by_chunk, at_head, at_loss, buffers, rows * columns * work_bytes)

    # Backward, ``done`` blocks before the end: everything is linear in it between the first two and the last two.
    # The number of blocks whose gradients are being sent, in fp32: FSDP2 waits for a block before it sends the next, streamed weights for the
    # one before that, unless its shards have to go on over data.
    waiting = 2 if is_streamed and layout.data == 1 else 1
    head_stored = 0.0 if in_root else GRADIENT_BYTES * trained.table / layout.z
    turns = [0, kinds[-1][1], w.layers - 1]  # the last block, the last one of the first kind, the first block
    for done in {turn + i for turn in turns for i in (-1, 0, 1, 2)} & set(range(w.layers)):
        left, held = w.layers - done, 0.0
        for kind, blocks in kinds:  # the last of those that are left is in work
            if left > 0:
                work, count = works[kind], min(left, blocks)
                held, left = held + count * work.each, left - count
        block = w.layers - done - 1
        if offloaded:  # that of the block in work, and that of the block before it, which is on its way
            held += block_input * (1 + (0 < block < offloaded))
        gradients = root_gradient + head_stored + GRADIENT_BYTES * done * trained.block / layout.z
        if layout.accumulates_shards:
            gradients = added_up + (gradients if is_streamed else root_gradient)
        elif accumulates:
            gradients += GRADIENT_BYTES * (whole - done * trained.block - (0 if in_root else trained.table))
        if sends:
            gradients += GRADIENT_BYTES * trained.most * min(done, waiting)
            if not in_root and done < waiting:
                gradients += GRADIENT_BYTES * trained.table
            if waiting == 2:
                gradients += GRADIENT_BYTES * trained.inner * (1 + 1 / layout.z)
        # Owned experts: added up over micro-batches, they are beside those of the last one until these are summed over data.
        if not layout.accumulates_shards:
            gradients += of_owned * (w.layers if accumulates else done)
        elif layout.data > 1:
            gradients += of_owned * done
        for in_work, elements in work.in_work:
            now, activations = gradients + work_bytes * elements, held + work.live + in_work
            if done < w.layers - 1:
                gathered = in_block + casts * min(w.layers - done, 3 if accumulates else 1)
                yield at("backward", now, activations, gathered, buffers)
            else:
                yield at("backward's last block", now, activations, in_last)

    # The embedding's gradient in the compute precision, with the last block's being sent; then its own are.
    gradients = GRADIENT_BYTES * w.layers * trained.block / layout.z + head_stored + of_owned * w.layers
    ends = trained.outside if in_root else trained.table
    if layout.accumulates_shards:
        gradients = added_up + (gradients - of_owned * w.layers if is_streamed else 0.0)
    elif accumulates:
        gradients += GRADIENT_BYTES * ends
    being_sent = GRADIENT_BYTES * trained.block * waiting if sends else 0.0
    first_gradients = gradients + root_gradient + work_bytes * trained.table + being_sent
    yield at("the embedding's gradient", first_gradients, block_input, root)
    if sends:
        # Without z to cut them, FSDP2 divides the sum over data in a copy.
        wide = GRADIENT_BYTES * ends * (1 if layout.z > 1 or is_streamed else 2)
        yield at("the embedding's gradient", gradients + wide + work_bytes * ends)
    in_step = 0.0
    if optimizer == "muon":
        in_step = max(
            STEP_BYTES * (stored - by_muon), *(muon_step_bytes(m) for m in muon_matrices(w, layout))
        )
    if optimizer == "adamw-bf16":
        in_step = (
            2 * WIDE_BYTES * min(max(shard.table, shard.inner) / layout.z, PART)
        )  # two moments of a parameter, in fp32
    yield at("the optimizer's step", GRADIENT_BYTES * stored, state=moments + in_step)
