"""Bytes that a step moves besides its matmuls and attention: norms, rotation, gate, loss, copies of weights, optimizer.

Fused kernels read each input and write each output once. Eager PyTorch, in which Hugging Face's modules run, has a kernel for
each operator and also moves what is between; the values are the sums over the operators of a dry run. Of compiled blocks they
are those of the kernels that Inductor makes; embedding, loss and copies of weights stay eager
(`tests/planner/cost/test_elementwise.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fourfold.parallel.loss.chunk_size import chunk_tokens
from fourfold.planner.inputs.layout import Elementwise, Layout
from fourfold.planner.inputs.workload import Workload


class Moved(NamedTuple):
    """Bytes in forward and in backward."""

    forward: float
    backward: float


# For each feature of the residual stream: two norms and two additions. Eager, a norm in fp32 is 36 bytes forward and 92 back.
_RESIDUAL = {
    "fused": Moved(2 * 4 + 2 * 6, 40),
    "eager": Moved(2 * 36 + 2 * 6, 2 * 92),
    "compiled": Moved(18, 38),
}
# Compiled, on tensor ranks: the matmuls end in operators of their own. Norms of sharded features sum over ranks between two kernels.
_COMPILED_OVER_X, _COMPILED_OVER_Y = Moved(20, 24), Moved(28, 35)
# The same of LayerNorm, which PyTorch has a kernel for; not so where its features are sharded (parallel/layers.py).
_LAYER_NORMS, _SHARDED_LAYER_NORMS = Moved(2 * 4 + 2 * 6, 36), Moved(2 * 60 + 2 * 6, 2 * 122)
_BIAS = 4  # added to an output by an operator of its own, where the linear is sharded
_COPY = 4  # read and written
# For each feature of q, k and v: rotation, and the layout that attention wants.
_HEADS = {"fused": Moved(8, 16), "eager": Moved(17, 27), "compiled": Moved(8.5, 4)}
# For each inner feature: the activation function, and the product with the gate if there is one.
_GATED = {"fused": Moved(6, 12), "eager": Moved(10, 18), "compiled": Moved(6, 10)}
_UNGATED = {"fused": Moved(4, 8), "eager": Moved(4, 6), "compiled": Moved(4, 6)}
_IN_PARTS = Moved(36, 60)  # eager, where PyTorch has no operator of its own for the function (gelu_new)
# For each logit in bf16: maximum, exponentials in fp32, sum, and the gradient; fused: with the stock loss, which does it both ways.
_LOSS = {"fused": 66, "eager": 26, "compiled": 26}
# For each element of the head and chunk of the loss: its gradient is added in fp32, and then copied.
_HEAD_SUM = 10
# For each feature of the embedding's output and the last norm, both ways.
_ENDS = {"fused": 12, "eager": 4 + 36 + 92, "compiled": 4 + 36 + 92}
# Fused AdamW reads parameter, gradient and two moments and writes all but the gradient; as operators one after another it passes over
# them eight times. Clipping reads the gradients, and reads and writes them once more.
CLIP_BYTES = 12
# To unpack a number of NF4 (`weights/nf4.py`): four bits and a part of a scale become an index, which is read, a value in fp32, which is
# written and read, and a number in bf16.
UNPACKED_BYTES = 0.5 + 2 + 2 + 4 + 4 + 2
_ADAMW, _ADAMW_IN_PARTS = 28, 80
_WIDEN = 24  # two moments from bf16 to fp32 and back


def block_bytes(
    w: Workload,
    y: int,
    x: int,
    elementwise: Elementwise,
    *,
    cuts_tokens_over_x: bool = False,
    by_tokens: bool = False,
) -> Moved:
    """Bytes of one block for one token; with sequence-parallel activations, for one of the tokens that x and y ranks share."""
    residual, heads = _RESIDUAL[elementwise], _HEADS[elementwise]
    inner = (_GATED if w.gated else _UNGATED)[elementwise]
    if elementwise == "eager" and not w.gated and w.activation_copies > 2:
        inner = _IN_PARTS
    is_sharded = y * x > 1
    if elementwise == "eager" and w.bias:
        residual = _SHARDED_LAYER_NORMS if is_sharded else _LAYER_NORMS
    if elementwise == "compiled" and is_sharded:
        residual = _COMPILED_OVER_Y if y > 1 else _COMPILED_OVER_X
    hidden = w.hidden / (y * (x if cuts_tokens_over_x or by_tokens else 1))
    by_heads = by_tokens and w.divides_heads(y * x)
    parts = x * y if by_heads else x
    qkv = w.q_features / parts + 2 * w.kv_features / min(parts, w.kv_heads)
    own_ffn = w.ffn if w.experts is None else w.experts.shared  # experts are in `experts.py`
    ffn = own_ffn / (x * y if by_tokens else x)
    forward, backward = (residual[way] * hidden + heads[way] * qkv + inner[way] * ffn for way in (0, 1))
    if elementwise == "eager" and is_sharded:
        biased = qkv if w.qkv_bias or w.bias else 0.0
        biased += 2 * hidden + ffn if w.bias else 0.0
        forward += _BIAS * biased
    if elementwise == "compiled" and y > 1:
        # Outputs that are summed over y together are put together first; by heads each rank's part, and so in backward.
        q, kv = w.q_features / x, 2 * w.kv_features / min(x, w.kv_heads)
        if not w.fused_qkv:
            forward += _COPY * (kv + q * (1.5 if by_heads else 1.0))
            backward += _COPY * (kv + q) * by_heads
        forward += _COPY * (2 * own_ffn / x if w.gated else 0.0)
    if elementwise != "fused" and by_tokens and y > 1:
        # Gradients of siblings, where tokens of all ranks were gathered, are copied out of one buffer.
        gate_and_up = 2 * own_ffn / x if w.gated else 0.0
        backward += _COPY * gate_and_up
        if elementwise == "eager":
            # They are copied into it, and outputs that share a buffer out of it: q, k and v where they are sharded by heads.
            features = 0.0
            if by_heads:
                features = w.q_features / x
                features += 2 * w.kv_features / min(x, w.kv_heads) if w.kv_heads % (x * y) == 0 else 0.0
                forward += _COPY * (features / y if not w.fused_qkv else 0.0)
            backward += _COPY * (features + gate_and_up) / y
    return Moved(forward, backward)


def ends_bytes(
    w: Workload, y: int, columns: float, elementwise: Elementwise, *, by_tokens_over: tuple[int, int] = (1, 1)
) -> float:
    """Bytes of embedding, last norm and loss for one token, both ways; ``by_tokens_over`` y and x ranks with other tokens."""
    of_y, of_x = by_tokens_over
    return _LOSS[elementwise] * columns / of_y + _ENDS[elementwise] * w.hidden / (y * of_x)


def head_sum_bytes(w: Workload, tokens: float, y: int, x: int, elementwise: Elementwise) -> float:
    """Bytes of the sum of the head's gradient over the chunks of the loss."""
    chunks = math.ceil(tokens / chunk_tokens(w.vocabulary, x, 2))
    if elementwise == "fused" or chunks == 1:
        return 0.0
    return _HEAD_SUM * chunks * -(-w.vocabulary // x) * w.hidden / y


def optimizer_bytes(is_fused: bool, *, widens: bool = False) -> float:
    """Bytes of clipping and AdamW for each parameter that a rank stores."""
    return (_ADAMW if is_fused else _ADAMW_IN_PARTS) + CLIP_BYTES + (_WIDEN if widens else 0)


def copied_bytes(layout: Layout, elementwise: Elementwise) -> Moved:
    """Bytes of copies of weights before they are used, and of gradients before they are sent, for each element of a block.

    FSDP2 copies out of the buffer of its gather, and into that of its scatter, casting on the way; shards are cast before.
    """
    if elementwise == "fused":
        return Moved(0.0, 0.0)
    cast = 6 / layout.z
    if layout.weights == "streamed":
        return Moved(cast, 6 + 8 / layout.z)
    return Moved(cast + (4 + 4 / layout.z if layout.z > 1 else 4), 6 + 8 / layout.z)
