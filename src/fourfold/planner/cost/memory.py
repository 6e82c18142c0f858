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
from fourfold.planner.cost.optimizer import (
    ADAMW_STATE_BYTES,
    MUON_STATE_BYTES,
    muon_matrices,
    muon_step_bytes,
)
from fourfold.planner.cost.sequences import held_in_backward
from fourfold.planner.inputs.experts import owners_of
from fourfold.planner.inputs.layout import ExpertsLayout, Layout
from fourfold.planner.inputs.workload import Workload
from fourfold.weights.quantization import BYTES_BETWEEN, UNPACKED_AT_ONCE

MASTER_BYTES = 4
STEP_BYTES = 4  # beside Muon, AdamW makes one temporary of every shard; alone it is fused
GRADIENT_BYTES = 4
WORK_BYTES = 2  # bf16, unless the work is in fp32
WIDE_BYTES = 4  # norms and loss compute in fp32

HEAD_BYTES = 4  # the logarithm of the softmax's sum, fp32, for each head
# In addition to its logits the stock loss of a single rank holds an fp32 copy and a temporary, and its gradient in the precision of
# the work. Otherwise the loss has a chunk of the logits, and a piece of it in fp32 (parallel/loss/chunked.py).
STOCK_LOSS_BYTES = 10
# Backward of a norm, for each feature: the gradient in fp32 and three products of it; in the precision of the work the
# gradients of its output and of the residual stream.
NORM_BACKWARD_WIDE, NORM_BACKWARD_COPIES = 4, 2
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


def norm_bytes(workload: Workload, cut: bool, work_bytes: int) -> int:
    """What autograd keeps of a norm for each feature of a token, with the output, which is the next linears' input."""
    if (
        not workload.bias
    ):  # RMSNorm: the input in fp32, the normal before the gain, if that has a gradient, and the output
        return WIDE_BYTES + (1 if workload.lora_rank else 2) * work_bytes
    if not cut:  # the fused LayerNorm of PyTorch keeps its input as it came
        return 2 * work_bytes
    return 2 * WIDE_BYTES + work_bytes  # centred and normal in fp32 (parallel/layers.py)


# Of a block with experts: for each choice of a token its order, and for each expert its score, in bytes.
_CHOICE_BYTES, _SCORE_BYTES = 28, 8


class _ExpertsKept(NamedTuple):
    """Bytes for each token that x and y ranks share: of the experts of a block, those that all tokens share left out."""

    saved: float  # for backward
    selective: float  # what a selective block keeps of it
    in_work: float  # gradients and temporaries, while all of that is there
    after: float  # the same, when the inner features are gone: relative to ``saved``
    again: float  # what a selective block makes again while that is there


def _experts_kept(w: Workload, layout: Layout, work_bytes: int, load: float) -> _ExpertsKept:
    """`parallel/experts/function.py` keeps the tokens once, and gate, up, the activation and the product of each choice."""
    e, y, x = w.experts, layout.y, layout.x
    assert e is not None
    owners = owners_of(layout.experts, layout.z, y, x)
    owns_x = owners is not None and "x" in owners.axes
    # By one of the tokens that x and y ranks share, where x ranks send their own.
    choices = e.chosen / x if owns_x else e.chosen
    rows = choices * (load if owners else 1.0)
    inner, h = e.features / (y if owns_x else y * x), w.hidden
    features = rows * w.activation_copies * inner
    up = 2 if w.gated else 1
    selective = rows * up * inner
    if owns_x:  # the gathered input
        features += (h / x if layout.by_tokens else h) if y > 1 else 0.0
    elif y * x > 1:  # the gathered input, and that of the router
        features += h + (h / x if layout.by_tokens else 0.0)
    if owners is not None:  # what arrived, and what came back
        features += rows * h + choices * h
        selective += rows * h + choices * h
    else:
        selective += h
    own = 1 / x if layout.by_tokens else 1.0
    small = choices * _CHOICE_BYTES + own * e.number * _SCORE_BYTES
    in_work = work_bytes * rows * (h + 3 * inner)
    after = work_bytes * rows * (2 * h - (w.activation_copies - up) * inner)
    again = 0.0
    if owners is not None:  # rows that came back, in order and weighted
        again = 3 * work_bytes * choices * h
        in_work = max(in_work, (3 * WIDE_BYTES if e.wide_weights else 2 * work_bytes) * choices * h)
    return _ExpertsKept(work_bytes * features + small, work_bytes * selective + small, in_work, after, again)


def saved_bytes_per_token(
    w: Workload, layout: Layout, work_bytes: int, length: int, expert_load: float = 1.0
) -> float:
    """What autograd keeps of one block for one token; by tokens, for one of the tokens that x and y ranks share.

    Sequence-parallel, everything is sharded over both axes except the gathered inputs of linears where they are kept, the
    norms' statistics, and heads that do not divide.
    """
    y, x, by_tokens = layout.y, layout.x, layout.by_tokens
    ranks = y * x
    keep_inputs = layout.keep_inputs or not by_tokens
    by_heads = by_tokens and w.divides_heads(ranks)
    q_parts = ranks if by_heads else x
    inner_parts, hidden_parts = (ranks, ranks) if by_tokens else (x, y)
    q, kv = w.q_features / q_parts, w.kv_features / min(q_parts, w.kv_heads)
    # q and k after rotation, v, the attention's output.
    features = 2 * w.q_features / q_parts + kv + _saved_v(w, layout, q, kv)
    if w.latent is not None:  # v is a part of one output with k
        at, own = w.latent, 1 / x if by_tokens else 1.0
        features = (2 * w.q_features + w.o_features + w.heads * (at.unrotated + at.value)) / q_parts
        features += own * (at.q + at.kv) * (2 + WIDE_BYTES / work_bytes)
    ffn = w.ffn if w.experts is None else w.experts.shared
    # The MLP's tensors, of which the input of down is gathered; the inputs of o (in addition to the attention's output, which
    # is a part of it), of q, k, v and of gate and up.
    features += (w.activation_copies - 1) * ffn / inner_parts + ffn / (x if keep_inputs else inner_parts)
    if keep_inputs and y > 1 and by_heads:
        features += w.q_features / x
    features += 2 * w.hidden / (y if keep_inputs else hidden_parts)
    norm = norm_bytes(w, by_tokens or ranks > 1, work_bytes) - work_bytes
    norms = 2 * (norm * w.hidden / hidden_parts + (WIDE_BYTES / x if by_tokens else 0.0))
    kept = work_bytes * features + norms + HEAD_BYTES * w.heads / q_parts
    if w.kept_more is not None:
        scores = w.heads * length / q_parts
        widths = (w.hidden / hidden_parts, w.q_features / q_parts, kv, w.ffn / inner_parts, scores)
        for (wide, narrow), width in zip(w.kept_more, widths, strict=True):
            kept += (WIDE_BYTES * wide + work_bytes * narrow) * width
    return kept if w.experts is None else kept + _experts_kept(w, layout, work_bytes, expert_load).saved


def _saved_v(w: Workload, layout: Layout, q: float, kv: float) -> float:
    """Features that v keeps alive: its own, or the whole buffer of outputs that were reduced together.

    A bias makes a new v. Sequence-parallel, v is also new where it was copied out of the buffer, and with y = 1 each output has its
    own memory; one matrix for q, k and v has one buffer for all three, which v is a part of, and q and k if nothing is rotated;
    so has a single rank.
    """
    y, x, ranks = layout.y, layout.x, layout.y * layout.x
    has_bias = w.bias or w.qkv_bias
    if w.fused_qkv and (layout.by_tokens or ranks == 1):
        return q + 2 * kv if w.rotates else kv
    if layout.by_tokens and w.divides_heads(ranks) and y > 1:
        return kv if w.kv_heads % ranks == 0 else w.kv_features / min(x, w.kv_heads) * (1 if has_bias else 2)
    shares_buffer = y > 1 if layout.by_tokens else ranks > 1
    return q + 2 * kv if shares_buffer and not has_bias else kv


def kept_bytes_per_token(w: Workload, layout: Layout, work_bytes: int, expert_load: float = 1.0) -> float:
    """What a selective block keeps besides its input: the outputs of all linears but the last one, and of attention.

    It computes FlexAttention again, and keeps the last linear's output where a norm follows.
    """
    y, x, by_tokens = layout.y, layout.x, layout.by_tokens
    ranks = y * x
    by_heads = by_tokens and w.divides_heads(ranks)
    q_parts = ranks if by_heads else x
    # Where ranks of y share a key/value head, each has all of it.
    kv_parts = min(q_parts if w.kv_heads % q_parts == 0 else x, w.kv_heads)
    inner_parts, hidden_parts = (ranks, ranks) if by_tokens else (x, y)
    features = (1 if w.is_flex else 2) * w.q_features / q_parts + 2 * w.kv_features / kv_parts
    if w.latent is not None:
        at, own = w.latent, 1 / x if by_tokens else 1.0
        features = (w.q_features + w.o_features + w.heads * (at.unrotated + at.value)) / q_parts
        features += own * (at.q + at.kv + at.rotated)
    features += (2 if w.norm_after_mlp else 1) * w.hidden / hidden_parts
    ffn = w.ffn if w.experts is None else w.experts.shared
    features += (2 if w.gated else 1) * ffn / inner_parts
    statistics = 2 * WIDE_BYTES / (x if by_tokens else 1) if y > 1 else 0.0
    heads = 0.0 if w.is_flex else HEAD_BYTES * w.heads / q_parts
    kept = work_bytes * features + heads + statistics
    if w.experts is None:
        return kept
    shared = (
        work_bytes * w.hidden / hidden_parts if ffn else 0.0
    )  # the output of shared experts is not the last product
    return kept + shared + _experts_kept(w, layout, work_bytes, expert_load).selective


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
    of_experts = _experts_kept(w, layout, work_bytes, expert_load)
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
