"""What a block keeps from forward to backward, in bytes for each token."""

from __future__ import annotations

from typing import NamedTuple

from fourfold.planner.inputs.experts import owners_of
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload

WIDE_BYTES = 4  # norms and loss compute in fp32
HEAD_BYTES = 4  # the logarithm of the softmax's sum, fp32, for each head


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


class ExpertsKept(NamedTuple):
    """Bytes for each token that x and y ranks share: of the experts of a block, those that all tokens share left out."""

    saved: float  # for backward
    selective: float  # what a selective block keeps of it
    in_work: float  # gradients and temporaries, while all of that is there
    after: float  # the same, when the inner features are gone: relative to ``saved``
    again: float  # what a selective block makes again while that is there


def experts_kept(w: Workload, layout: Layout, work_bytes: int, load: float) -> ExpertsKept:
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
    return ExpertsKept(work_bytes * features + small, work_bytes * selective + small, in_work, after, again)


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
    return kept if w.experts is None else kept + experts_kept(w, layout, work_bytes, expert_load).saved


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
    return kept + shared + experts_kept(w, layout, work_bytes, expert_load).selective
