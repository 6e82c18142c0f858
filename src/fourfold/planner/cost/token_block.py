"""One transformer block with token-sharded activations: what it computes, what it sends on x and y, what shows.

The order is that of `parallel/sharded_linear.py`. Each group of linears with one input gathers it over the axis that cuts its
tokens, and scatters its outputs over the axis that it sums over; backward is the mirror. Norms, residual sums, activation
functions and attention's core are done once: on 1/(x*y) of the tokens, or of the heads where these divide.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

from fourfold.planner.cost.block import Given, Linked, Pass, columns_of, ends, floored, in_turns, together_s
from fourfold.planner.cost.collective import Kind
from fourfold.planner.cost.compute import attention_core_s, matmul_s, memory_s
from fourfold.planner.cost.elementwise import block_bytes, ends_bytes
from fourfold.planner.inputs.workload import Workload

Cut = Literal["tokens", "features", "whole"]  # `parallel/sequence.py`


class Linears(NamedTuple):
    """A group of linears that read one input; sizes are those of the matmul, so of the gathered input."""

    inputs: float
    outputs: tuple[float, ...]
    in_axis: str
    out_axis: str
    enter: Cut = "tokens"
    leaves: tuple[Cut, ...] = ("tokens",)


def groups_of(workload: Workload, y: int, x: int, samples: float) -> list[Linears]:
    w = workload
    q, kv, hidden, inner = w.q_features / x, w.kv_features / min(x, w.kv_heads), w.hidden / y, w.ffn / x
    of_q, of_kv = head_cuts(w, y, x, samples)
    up: tuple[Cut, ...] = ("tokens", "tokens") if w.gated else ("tokens",)
    return [
        Linears(hidden, (q, kv, kv), "y", "x", "tokens", (of_q, of_kv, of_kv)),
        Linears(q, (hidden,), "x", "y", of_q),
        Linears(hidden, (inner,) * len(up), "y", "x", "tokens", up),
        Linears(inner, (hidden,), "x", "y"),
    ]


def head_cuts(workload: Workload, y: int, x: int, samples: float) -> tuple[Cut, Cut]:
    """How the second axis cuts q and attention's output, and how k and v."""
    over_y = workload.core_over_y(y, x, samples)
    if over_y != "heads":
        cut: Cut = "tokens" if over_y == "samples" else "whole"
        return cut, cut
    return "features", "features" if workload.kv_heads % (y * x) == 0 else "whole"


def _forward(groups: list[Linears], given: Given) -> Linked:
    g = given
    matmul, link, exposed = 0.0, {"x": 0.0, "y": 0.0}, {"x": 0.0, "y": 0.0}
    for group in groups:
        gather_s = _gather_s(group.out_axis, group.enter, group.inputs, g)
        link[group.out_axis] += gather_s
        exposed[group.out_axis] += gather_s  # the matmuls wait for it
        pieces: list[tuple[float, float]] = []  # (multiplied, sent) one after the other
        for leave, outputs in _alike(group):
            features = sum(outputs)
            own_s = sum(_matmul_s(n, leave, group, g, "forward") for n in outputs)
            payload_bytes = g.schedule.weight_bytes * g.tokens * features
            chunks = max(1, min(g.schedule.forward_chunks, int(payload_bytes // g.schedule.chunk_bytes)))
            sent_s = _reduce_s(group.in_axis, leave, features / chunks, g)
            pieces += [(own_s / chunks, sent_s)] * chunks
            matmul += own_s
            link[group.in_axis] += chunks * sent_s
        # The first piece is multiplied alone, the last is sent alone; between, each behind the next's matmul.
        taken_s = pieces[0][0] + pieces[-1][1]
        for (_, sent_s), (own_s, _) in itertools.pairwise(pieces):
            taken_s += together_s(own_s, sent_s, g.slowdown)
        exposed[group.in_axis] += max(0.0, taken_s - sum(own_s for own_s, _ in pieces))
    return matmul, link, exposed


def _backward(groups: list[Linears], given: Given) -> Linked:
    g = given
    matmul, link, exposed = 0.0, {"x": 0.0, "y": 0.0}, {"x": 0.0, "y": 0.0}
    for group in groups:
        outputs = list(zip(group.outputs, group.leaves, strict=True))
        input_s = sum(_matmul_s(features, leave, group, g, "input") for features, leave in outputs)
        weight_s = sum(_matmul_s(features, leave, group, g, "weight") for features, leave in outputs)
        matmul += input_s + weight_s
        # The matmuls wait for the gradients of all siblings, which come together.
        arrive_s = sum(_gather_s(group.in_axis, leave, sum(alike), g) for leave, alike in _alike(group))
        link[group.in_axis] += arrive_s
        exposed[group.in_axis] += arrive_s
        hides = g.schedule.hides_backward
        # The sum of the input's gradient goes on behind the weights' gradients.
        sent_s = _reduce_s(group.out_axis, group.enter, group.inputs, g)
        link[group.out_axis] += sent_s
        exposed[group.out_axis] += together_s(weight_s, sent_s, g.slowdown) - weight_s if hides else sent_s
        if not g.keep_inputs:
            # The input comes again, behind the matmuls of its gradient.
            again_s = _gather_s(group.out_axis, group.enter, group.inputs, g)
            link[group.out_axis] += again_s
            exposed[group.out_axis] += together_s(input_s, again_s, g.slowdown) - input_s
    return matmul, link, exposed


def _alike(group: Linears) -> list[tuple[Cut, list[float]]]:
    """Outputs that are cut in the same way: one collective serves them all."""
    found: dict[Cut, list[float]] = {}
    for features, leave in zip(group.outputs, group.leaves, strict=True):
        found.setdefault(leave, []).append(features)
    return list(found.items())


def _gather_s(axis: str, cut: Cut, features: float, given: Given) -> float:
    if cut == "whole":
        return 0.0
    return given.send("all_gather", axis, given.schedule.weight_bytes * given.tokens * features)


def _reduce_s(axis: str, cut: Cut, features: float, given: Given) -> float:
    kind: Kind = "all_reduce" if cut == "whole" else "reduce_scatter"
    return given.send(kind, axis, given.schedule.weight_bytes * given.tokens * features)


def _matmul_s(features: float, leave: Cut, group: Linears, given: Given, which: str) -> float:
    """A member's product; what is cut by its features comes, and leaves, in a piece for each rank."""
    ranks = {"y": given.y, "x": given.x}
    pieces_in = ranks[group.out_axis] if group.enter == "features" else 1
    pieces_out = ranks[group.in_axis] if leave == "features" else 1
    n, k, tokens = features / pieces_out, group.inputs / pieces_in, given.tokens
    sizes = {"forward": (tokens, n, k), "input": (tokens, k, n), "weight": (n, k, tokens)}[which]
    return pieces_in * pieces_out * matmul_s(1, *sizes, given.device, given.kernels.matmul_share)


def _replicas(workload: Workload, y: int, x: int, samples: float) -> list[tuple[str, float]]:
    """(axis, elements) of weights that several ranks use for other tokens, heads or rows: their gradients are summed."""
    w = workload
    hidden = w.hidden / y
    of_norms = [("x", hidden)] * (4 if w.bias else 2)
    of_rows = [("x", hidden)] * 2 if w.bias else []
    of_q, of_kv = head_cuts(w, y, x, samples)
    of_columns: list[tuple[str, float]] = []
    if w.bias or w.qkv_bias:
        of_columns += [("y", w.q_features / x)] * (of_q != "whole")
        of_columns += [("y", w.kv_features / min(x, w.kv_heads))] * (2 * (of_kv != "whole"))
    if w.bias:
        of_columns += [("y", w.ffn / x)] * (2 if w.gated else 1)
    # Every x rank beyond the key/value heads holds all of their rows and has the gradient of its own.
    of_kv_rows: list[tuple[str, float]] = []
    if x > w.kv_heads:
        of_kv_rows += [("x", w.hidden * w.kv_features / y)] * 2
        of_kv_rows += [("x", float(w.kv_features))] * (2 if w.bias or w.qkv_bias else 0)
    return of_norms + of_rows + of_columns + of_kv_rows


def token_block_passes(workload: Workload, length: int, given: Given) -> tuple[Pass, Pass]:
    """A block's forward and backward, of tokens that all x and y ranks share; a recomputed forward is another forward."""
    w, (tokens, y, x, device, kernels, schedule, slowdown, send, _) = workload, given
    samples = tokens / length
    groups = groups_of(w, y, x, samples)
    matmul_f, link_f, exposed_f = _forward(groups, given)
    matmul_b, link_b, exposed_b = _backward(groups, given)
    over_y = w.core_over_y(y, x, samples)
    parts = x * y if over_y == "heads" else x
    core_f, core_b = attention_core_s(
        tokens / y if over_y == "samples" else tokens,
        length,
        w.q_features / parts,
        w.heads / parts,
        device,
        kernels,
        fused=schedule.attention == "flash",
    )
    moved = block_bytes(w, y, x, schedule.elementwise, by_tokens=True, samples=samples)
    elementwise_f, elementwise_b = (memory_s(kernels.memory_passes * tokens * m, device) for m in moved)
    if schedule.interleaves:
        exposed_f = in_turns(matmul_f + core_f + elementwise_f, link_f, exposed_f, slowdown)
        exposed_b = in_turns(matmul_b + core_b + elementwise_b, link_b, exposed_b, slowdown)
    statistics_s = 2 * send("all_reduce", "y", 4 * tokens / x)  # two norms; nothing hides them
    of_q, of_kv = head_cuts(w, y, x, samples)
    if of_q == "features" and of_kv == "whole":
        # Several y ranks use one key/value head: the gradients of k and v are summed over y.
        kv = w.kv_features / min(x, w.kv_heads)
        shared_s = 2 * send("all_reduce", "y", schedule.weight_bytes * tokens * kv)
        link_b["y"] += shared_s
        exposed_b["y"] += shared_s
    # Each by itself and in every micro-batch, as with FSDP2; streamed weights sum those of all blocks together, once a step.
    for axis, elements in _replicas(w, y, x, samples):
        replica_s = send("all_reduce", axis, schedule.gradient_bytes * elements)
        link_b[axis] += replica_s
        exposed_b[axis] += replica_s
    host_s = kernels.host_us * 1e-6
    return (
        floored(matmul_f, core_f, elementwise_f, link_f, exposed_f, statistics_s, host_s),
        floored(matmul_b, core_b, elementwise_b, link_b, exposed_b, statistics_s, 2 * host_s),
    )


def token_ends_pass(workload: Workload, given: Given) -> Pass:
    """Embedding, head and loss, forward and backward together."""
    w, (tokens, y, x, device, _, schedule, _, send, _) = workload, given
    columns = columns_of(w, x)
    head = [Linears(w.hidden / y, (columns,), "y", "x")]
    moved_bytes = tokens * ends_bytes(w, y, columns, schedule.elementwise, by_tokens_over=(y, x))
    # The lookup in a vocabulary that is cut over x is a sum, and its gradient a gather; then the loss's maximum and its two
    # sums, for this y rank's tokens.
    looked_up_bytes = schedule.weight_bytes * tokens * w.hidden / y
    alone_s = send("reduce_scatter", "x", looked_up_bytes) + send("all_gather", "x", looked_up_bytes)
    alone_s += send("all_reduce", "x", 4 * tokens / y) + send("all_reduce", "x", 8 * tokens / y)
    # The last norm, as in a block, and positions.
    alone_s += (2 if w.bias else 1) * send("all_reduce", "x", schedule.gradient_bytes * w.hidden / y)
    if w.positions:
        alone_s += send("all_reduce", "x", schedule.gradient_bytes * w.positions * w.hidden / y)
    statistics_s = 2 * send("all_reduce", "y", 4 * tokens / x)
    forward, backward = _forward(head, given), _backward(head, given)
    return ends(forward, backward, memory_s(moved_bytes, device), {"x": alone_s, "y": statistics_s})
