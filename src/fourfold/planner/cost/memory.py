"""How many bytes a rank holds at its peak, in closed form, by category.

The peak is one of a few moments: the loss (all activations, the logits), a block of backward (what is left of the
activations, the gradients so far, a block in work), the gradient of the embedding, the optimizer's step. What is held then
is counted as the engine holds it (`weights/streamed.py`, `weights/api.py`, FSDP2): fp32 shards, gradients and moments;
bf16 blocks gathered over z. `tests/planner/cost/test_memory.py` compares it with the dry run, which counts every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload

MASTER_BYTES = 4
MOMENTS_BYTES = 8  # AdamW's two
STEP_BYTES = 4  # foreach AdamW makes one temporary of every shard
GRADIENT_BYTES = 4
WORK_BYTES = 2  # bf16, unless the work is in fp32
WIDE_BYTES = 4  # norms and loss compute in fp32

HEAD_BYTES = 4  # the logarithm of the softmax's sum, fp32, for each head
# Beside its logits the loss holds an fp32 copy and two fp32 temporaries of that size (parallel/loss.py); the stock loss of a
# single rank one fewer, but its gradient in the precision of the work.
LOSS_BYTES, STOCK_LOSS_BYTES = 12, 10
# Backward of a norm, for each feature: the gradient in fp32 and three products of it; in the precision of the work the
# gradients of its output and of the residual stream.
NORM_BACKWARD_WIDE, NORM_BACKWARD_COPIES = 4, 2
# Streamed weights gather four ahead of the one in use: five of a block's seven (or six) matrices.
STREAMED_WINDOW = 5


class Shard(NamedTuple):
    """Elements on one rank before z cuts them."""

    block: float
    table: float  # the embedding; the head has as many
    outside: float  # what is in no block, each element once
    largest: float  # the largest matrices of a block that are gathered at once
    q: float
    kv: float
    inner: float


def shard_of(workload: Workload, y: int, x: int) -> Shard:
    """The part of a block, and of what is outside, that one (y, x) rank computes with."""
    w = workload
    cut = y * x
    # Where x exceeds the key/value heads, every x rank holds all of their rows.
    kv = w.hidden * w.kv_features / (cut if x <= w.kv_heads else y)
    q = w.hidden * w.q_features / cut
    inner = w.hidden * w.ffn / cut
    matrices = [q, kv, kv, q, *([inner] * (3 if w.gated else 2))]
    table = -(-w.vocabulary // x) * w.hidden / y
    positions = w.positions * w.hidden / y
    outside = table * (1 if w.tied else 2) + positions + w.hidden / y
    window = matrices + matrices  # five in a row may reach into the next block
    largest = max(sum(window[i : i + STREAMED_WINDOW]) for i in range(len(matrices)))
    return Shard(sum(matrices) + w.block_vectors / y, table, outside, largest, q, kv, inner)


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
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.gathered_bytes
            + self.buffers_bytes
            + self.logits_bytes
        )


def norm_bytes(workload: Workload, cut: bool, work_bytes: int = WORK_BYTES) -> int:
    """What autograd keeps of a norm for each feature of a token, with the output, which is the next linears' input."""
    if not workload.bias:  # RMSNorm: the input in fp32, the normal before the gain, the output
        return WIDE_BYTES + 2 * work_bytes
    if not cut:  # the fused LayerNorm of PyTorch keeps its input as it came
        return 2 * work_bytes
    return 2 * WIDE_BYTES + work_bytes  # centred and normal in fp32 (parallel/norm.py)


def saved_bytes_per_token(workload: Workload, y: int, x: int, work_bytes: int = WORK_BYTES) -> float:
    """What autograd keeps of one block for one token."""
    w = workload
    cut = y * x > 1
    kv = w.kv_features / min(x, w.kv_heads)
    # q and k after rotation, v, the attention's output. Cut linears put q, k and v in one buffer, which v keeps whole, unless
    # a bias is added and makes a new v.
    copies = 3 if cut and not (w.bias or w.qkv_bias) else 2
    features = copies * (w.q_features / x + kv) + w.activation_copies * w.ffn / x
    return (
        work_bytes * features + 2 * norm_bytes(w, cut, work_bytes) * w.hidden / y + HEAD_BYTES * w.heads / x
    )


def saved_by_tokens(
    workload: Workload,
    y: int,
    x: int,
    *,
    keep_inputs: bool,
    work_bytes: int = WORK_BYTES,
    samples: float | None = None,
) -> float:
    """The same with token-sharded activations, for one of the tokens that all x and y ranks share.

    Everything is cut over both axes, but for the gathered inputs of linears where they are kept, the norms' statistics, and
    key/value heads where they are fewer than the ranks.
    """
    w = workload
    cut = y * x
    over_y = w.core_over_y(y, x, samples)
    parts = x if over_y == "whole" else cut
    # q and k after rotation, v, the attention's output. v is in one buffer with its siblings that leave in the same way, and
    # keeps it whole, unless a bias makes a new v, or it was copied out of it. With y = 1 each has memory of its own; of one
    # matrix for all three v is a part of their buffer, and where nothing is rotated so are q and k.
    of_x = w.kv_features / min(x, w.kv_heads)
    kv = w.kv_features / min(cut, w.kv_heads) if over_y == "heads" else of_x * x / parts
    has_bias = w.bias or w.qkv_bias
    if w.fused_qkv:
        v = w.q_features / parts + 2 * kv if w.rotates else kv
    elif y == 1:
        v = kv
    elif over_y == "heads":
        v = kv if w.kv_heads % cut == 0 else of_x * (1 if has_bias else 2)
    else:
        v = kv if has_bias else w.q_features / parts + 2 * kv
    features = 2 * w.q_features / parts + kv + v + (w.activation_copies - 1) * w.ffn / cut
    # The inputs of down, of o (beside the attention's output, which is a part of it), of q, k, v and of gate and up.
    features += w.ffn / (x if keep_inputs else cut)
    if keep_inputs and y > 1 and over_y != "whole":
        features += w.q_features / x
    features += 2 * w.hidden / (y if keep_inputs else cut)
    norms = 2 * ((norm_bytes(w, True, work_bytes) - work_bytes) * w.hidden / cut + WIDE_BYTES / x)
    return work_bytes * features + norms + HEAD_BYTES * w.heads / parts


def memory(
    workload: Workload,
    layout: Layout,
    tokens: float,
    shard: Shard | None = None,
    work_bytes: int = WORK_BYTES,
    length: int | None = None,
) -> Memory:
    """The peak of a rank that puts ``tokens`` through at a time, by category.

    Without the ``length`` of a sequence, so many that y divides them.
    """
    shard = shard or shard_of(workload, layout.y, layout.x)
    samples = tokens / length if length else None
    return max(_moments(workload, layout, tokens, shard, work_bytes, samples), key=_total)


def _moments(
    w: Workload,
    layout: Layout,
    tokens: float,
    shard: Shard,
    work_bytes: int,
    samples: float | None = None,
) -> Iterator[Memory]:
    whole = w.layers * shard.block + shard.outside
    stored = whole / layout.z
    cut = layout.y * layout.x > 1
    accumulates = layout.micro_batches > 1
    is_recomputed = layout.activation_checkpointing == "full"
    is_streamed = layout.weights == "streamed"
    sends = layout.z * layout.data > 1
    parameters, moments = MASTER_BYTES * stored, MOMENTS_BYTES * stored
    # What the linears read, gathered, and what is between them: the same, unless its tokens are cut as well.
    hidden_read, ffn_read = tokens * w.hidden / layout.y, tokens * w.ffn / layout.x
    hidden, ffn = hidden_read, ffn_read

    # Activations.
    if layout.by_tokens:
        hidden, ffn = hidden / layout.x, ffn / layout.y
        saved_bytes = saved_by_tokens(
            w,
            layout.y,
            layout.x,
            keep_inputs=layout.keep_inputs,
            work_bytes=work_bytes,
            samples=samples,
        )
    else:
        saved_bytes = saved_bytes_per_token(w, layout.y, layout.x, work_bytes)
    block_saved = tokens * saved_bytes
    block_input = work_bytes * hidden
    each, live = (block_input, block_saved) if is_recomputed else (block_saved, 0.0)
    norm = norm_bytes(w, cut, work_bytes)
    # In work: the gradients of a block's output, of the down projection's input and of what the activation function took; or,
    # behind the MLP, whose activations are gone by then, those of a norm.
    mlp = work_bytes * (hidden + 2 * ffn)
    behind_mlp = (4 * NORM_BACKWARD_WIDE + NORM_BACKWARD_COPIES * work_bytes) * hidden
    behind_mlp -= work_bytes * (w.activation_copies * ffn + hidden)
    last_norm = norm * hidden
    if layout.by_tokens:
        # Beside the gradient of the block's output all of it, gathered, and all of that of the down projection's input.
        again = 0 if layout.keep_inputs else 1
        mlp = work_bytes * (hidden + hidden_read + ffn + ffn_read * (1 + again))
        if w.gated and layout.y > 1:
            # Or, what the MLP kept being gone, the gradients of gate and up: together, gathered, and gathered each for itself.
            gone = (w.activation_copies - 1) * ffn + (ffn if again else ffn_read)
            siblings = hidden + 2 * ffn + 4 * ffn_read + hidden_read * (1 + again)
            mlp = max(mlp, work_bytes * (siblings - gone))
        # Behind the last norm the model's code has a tensor of all tokens, and the head a gathered input.
        last_norm += work_bytes * hidden_read * (2 if layout.keep_inputs else 1) * (layout.x > 1)
    in_work = max(mlp, behind_mlp)

    # Gathered weights. Whole on each rank and in the precision of the work, the shard is the block: nothing is gathered.
    copied = 0 if is_streamed and layout.z == 1 and work_bytes == MASTER_BYTES else work_bytes
    kept = min(layout.keep_bytes, copied * w.layers * shard.block)
    # FSDP2 has a last group for what is in no block, and no group of its own: gathered from the first forward to the end.
    in_root = not is_streamed and (w.tied or not cut)
    root = copied * shard.outside if in_root else 0.0
    # The head's gradient waits there for the embedding's.
    root_gradient = work_bytes * shard.table if in_root else 0.0
    buffers = 0.0
    if is_streamed:
        ahead = shard.inner + shard.q + shard.kv if is_recomputed else 3 * shard.inner
        at_loss = copied * (shard.table + ahead) + kept
        in_block = copied * (shard.block + shard.q + 2 * shard.kv if is_recomputed else shard.largest) + kept
        in_last = copied * (shard.block - shard.inner if is_recomputed else shard.largest)
        if layout.z > 1:  # the shards that are being sent, in the precision of the work
            buffers = copied * (shard.inner + shard.q + 2 * shard.kv) / layout.z
    else:
        # FSDP2 keeps the buffer of the last gather in forward until the next; there is none on a z of one.
        gathers = layout.z > 1
        last_gather = shard.block if in_root else shard.table
        at_loss = (root or copied * shard.table) + copied * last_gather * gathers
        in_block = root + copied * shard.block * (2 if gathers else 1)
        in_last = root + copied * shard.block

    # The loss. Gradients that are added up over micro-batches are whole over z until they are sent.
    logits = (work_bytes + (LOSS_BYTES if layout.ranks > 1 else STOCK_LOSS_BYTES)) * tokens
    logits *= -(-w.vocabulary // layout.x) / (layout.y if layout.by_tokens else 1)
    added_up = GRADIENT_BYTES * whole if accumulates else 0.0
    saved = w.layers * each + last_norm
    yield Memory(parameters, added_up, moments, saved, at_loss, buffers, logits, "the loss")
    if layout.by_tokens and layout.y > 1:
        # The gradient of a y rank's logits, and that of all, gathered; the gradients of the head and of its input.
        gathered_logits = work_bytes * tokens * -(-w.vocabulary // layout.x) * (1 + 1 / layout.y)
        live_head = work_bytes * (hidden + hidden_read * (1 if layout.keep_inputs else 2))
        head_gradient = added_up + work_bytes * shard.table
        yield Memory(parameters, head_gradient, moments, saved + live_head, at_loss, buffers, gathered_logits,
                     "the head's gradient")  # fmt: skip

    # Backward, ``done`` blocks before the end: everything is linear in it between the first two and the last two.
    # So many blocks' gradients are being sent, in fp32: FSDP2 waits for a block before it sends the next, streamed weights for the
    # one before that, unless its shards have to go on over data.
    waiting = 2 if is_streamed and layout.data == 1 else 1
    head_stored = 0.0 if in_root else GRADIENT_BYTES * shard.table / layout.z
    for done in {0, 1, 2, w.layers - 2, w.layers - 1} & set(range(w.layers)):
        gradients = root_gradient + head_stored + GRADIENT_BYTES * done * shard.block / layout.z
        if accumulates:
            gradients += GRADIENT_BYTES * (whole - done * shard.block - (0 if in_root else shard.table))
        if sends:
            gradients += GRADIENT_BYTES * shard.block * min(done, waiting)
            if not in_root and done < waiting:
                gradients += GRADIENT_BYTES * shard.table
            if waiting == 2:
                gradients += GRADIENT_BYTES * shard.inner * (1 + 1 / layout.z)
        gradients += work_bytes * (shard.inner if mlp > behind_mlp else (3 if w.gated else 2) * shard.inner)
        is_last = done == w.layers - 1
        yield Memory(
            parameters,
            gradients,
            moments,
            (w.layers - done) * each + live + in_work,
            in_last if is_last else in_block,
            0.0 if is_last else buffers,
            0.0,
            "backward's last block" if is_last else "backward",
        )

    # The embedding's gradient, in the precision of the work, beside the last block's that are being sent; then its own are.
    gradients = GRADIENT_BYTES * w.layers * shard.block / layout.z + head_stored
    ends = shard.outside if in_root else shard.table
    if accumulates:
        gradients += GRADIENT_BYTES * ends
    being_sent = GRADIENT_BYTES * shard.block * waiting if sends else 0.0
    yield Memory(parameters, gradients + root_gradient + work_bytes * shard.table + being_sent, moments, block_input, root,
                 0.0, 0.0, "the embedding's gradient")  # fmt: skip
    if sends:
        # Without z to cut them, FSDP2 divides the sum over data in a copy.
        wide = GRADIENT_BYTES * ends * (1 if layout.z > 1 or is_streamed else 2)
        yield Memory(parameters, gradients + wide + work_bytes * ends, moments, 0.0, 0.0, 0.0, 0.0,
                     "the embedding's gradient")  # fmt: skip
    yield Memory(parameters, GRADIENT_BYTES * stored, moments + STEP_BYTES * stored, 0.0, 0.0, 0.0, 0.0,
                 "the optimizer's step")  # fmt: skip


def _total(peak: Memory) -> float:
    return peak.total_bytes
