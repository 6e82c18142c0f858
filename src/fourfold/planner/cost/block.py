"""Time of one transformer block on the grid, forward and backward: computation, link time and exposed time on x and y.

Each group of linears that read one input runs in this order, as in `parallel/linear.py`; backward is the mirror:

    gather      the input, over the axis that shards its tokens or features
    multiply
    reduce      the outputs, over the axis that shards the input's features: a reduce-scatter, or an all-reduce where the
                output stays whole

With replicated activations everything is whole over the second axis: nothing is gathered, every reduction is an
all-reduce, and norms, activation functions and the core of attention are repeated. With sequence-parallel activations they run
once, on 1/(x*y) of the tokens, or of the heads if those divide.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

from fourfold.planner.cost.collective import Kind
from fourfold.planner.cost.compute import attention_core_s, matmul_s, memory_s
from fourfold.planner.cost.elementwise import UNPACKED_BYTES, block_bytes, ends_bytes, head_sum_bytes
from fourfold.planner.cost.experts import ExpertsTime, experts_passes
from fourfold.planner.cost.float8 import casts_s, shared_scales
from fourfold.planner.cost.linears import Given, Linears, Sharding
from fourfold.planner.inputs.cluster import Slowdown
from fourfold.planner.inputs.layout import Schedule
from fourfold.planner.inputs.workload import Workload
from fourfold.weights.overlap import Overlap


class Pass(NamedTuple):
    """One pass through a block, or through the head; link and exposed seconds by axis, x and y, and z where rows are sent to experts."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    link_s: dict[str, float]
    exposed_s: dict[str, float]

    @property
    def compute_s(self) -> float:
        return self.matmul_s + self.attention_s + self.elementwise_s


def together_s(compute_s: float, communication_s: float, slowdown: Slowdown) -> float:
    """Time of both at once, each slowed down by the other until the shorter ends (Galvatron's two coefficients)."""
    slow_compute_s = slowdown.compute * compute_s
    slow_communication_s = slowdown.communication * communication_s
    if slow_communication_s > slow_compute_s:
        return slow_compute_s + communication_s - slow_compute_s / slowdown.communication
    return slow_communication_s + compute_s - slow_communication_s / slowdown.compute


def groups_of(workload: Workload, y: int, x: int, *, by_tokens: bool) -> list[Linears]:
    w = workload
    hidden, inner = w.hidden / y, (w.ffn if w.experts is None else w.experts.shared) / x
    of_q, _ = head_shardings(w, y, x, by_tokens=by_tokens)
    between: Sharding = "tokens" if by_tokens else "whole"
    up = 2 if w.gated else 1
    groups = [
        *_into_attention(w, y, x, between),
        Linears(w.o_features / x, (hidden,), "x", "y", of_q, (between,)),
    ]
    if inner:  # or there are experts alone
        groups += [
            Linears(hidden, (inner,) * up, "y", "x", between, (between,) * up),
            Linears(inner, (hidden,), "x", "y", between, (between,)),
        ]
    if w.lora_rank:
        groups = [
            group._replace(is_trained=False, adapter_rank=w.lora_rank, is_packed=w.quantization == "nf4")
            for group in groups
        ]
    return groups


def _into_attention(w: Workload, y: int, x: int, between: Sharding) -> list[Linears]:
    """q, k and v. Latent features are few: their collectives are counted as those of other linears, which send more."""
    hidden, by_tokens = w.hidden / y, between == "tokens"
    of_q, of_kv = head_shardings(w, y, x, by_tokens=by_tokens)
    q, kv = w.q_features / x, w.kv_features / min(x, w.kv_heads)
    if w.latent is None:
        return [Linears(hidden, (q, kv, kv), "y", "x", between, (of_q, of_kv, of_kv))]
    at = w.latent
    of_heads = w.heads * (at.unrotated + at.value) / x
    latent = (at.q / x,) if at.q else (q,)
    first = Linears(hidden, (*latent, (at.kv + at.rotated) / x), "y", "x", between, (between,) * 2)
    second = [Linears(at.q / y, (q,), "y", "x", between, (of_q,))] if at.q else []
    return [first, *second, Linears(at.kv / y, (of_heads,), "y", "x", between, (of_kv,))]


def head_shardings(workload: Workload, y: int, x: int, *, by_tokens: bool) -> tuple[Sharding, Sharding]:
    """How y shards q and attention's output, and how k and v."""
    if not by_tokens or not workload.divides_heads(y * x):
        return "whole", "whole"
    return "features", "features" if workload.kv_heads % (y * x) == 0 else "whole"


def _forward(groups: list[Linears], given: Given) -> Pass:
    g = given
    matmul, link, exposed = 0.0, {"x": 0.0, "y": 0.0}, {"x": 0.0, "y": 0.0}
    for group in groups:
        gather_s = _gather_s(group.out_axis, group.input_sharding, group.inputs, g)
        link[group.out_axis] += gather_s
        exposed[group.out_axis] += gather_s  # the matmuls wait for it
        pieces: list[tuple[float, float]] = []  # (matmul, reduction) seconds in order
        for sharding, outputs in _by_sharding(group):
            features = sum(outputs)
            own_s = sum(_matmul_s(n, sharding, group, g, "forward") for n in outputs)
            chunks = _chunks(g.tokens * features, int(group.inputs), g.schedule)
            if chunks > 1 and g.schedule.elementwise == "compiled":
                own_s += _joined_s(group.in_axis, sharding, features, g)
            sent_s = _reduce_s(group.in_axis, sharding, features / chunks, g)
            pieces += [(own_s / chunks, sent_s)] * chunks
            matmul += own_s
            link[group.in_axis] += chunks * sent_s
        if pieces[-1][1] == 0.0:
            continue
        # Only the first matmul and the last reduction run alone; each other reduction overlaps the next matmul.
        taken_s = pieces[0][0] + pieces[-1][1]
        for (_, sent_s), (own_s, _) in itertools.pairwise(pieces):
            taken_s += together_s(own_s, sent_s, g.slowdown)
        exposed[group.in_axis] += max(0.0, taken_s - sum(own_s for own_s, _ in pieces))
    return Pass(matmul, 0.0, 0.0, link, exposed)


_AUTO = Overlap()


def _chunks(elements: float, features: int, schedule: Schedule) -> int:
    """Of the sum of an output."""
    if schedule.chunks_for is None:
        return 1
    return _AUTO.chunks_of(elements, schedule.weight_bytes, features, schedule.chunks_for)


def _joined_s(axis: str, sharding: Sharding, features: float, given: Given) -> float:
    """In a graph each chunk of an output has its own memory. What a rank keeps of them is put together in the end."""
    ranks = {"y": given.y, "x": given.x}[axis]
    if ranks == 1:
        return 0.0  # nothing is sent
    kept = 1 if sharding == "whole" else ranks
    return memory_s(2 * given.schedule.weight_bytes * given.tokens * features / kept, given.device)


def _backward(groups: list[Linears], given: Given) -> Pass:
    g = given
    matmul, link, exposed = 0.0, {"x": 0.0, "y": 0.0}, {"x": 0.0, "y": 0.0}
    for group in groups:
        outputs = list(zip(group.outputs, group.output_shardings, strict=True))
        input_s = sum(_matmul_s(features, sharding, group, g, "input") for features, sharding in outputs)
        weight_s = sum(_matmul_s(features, sharding, group, g, "weight") for features, sharding in outputs)
        matmul += input_s + weight_s
        # The matmuls wait for the gradients of all outputs, which arrive together.
        arrive_s = sum(_gather_s(group.in_axis, how, sum(alike), g) for how, alike in _by_sharding(group))
        link[group.in_axis] += arrive_s
        exposed[group.in_axis] += arrive_s
        # The reduction of the input's gradient overlaps the matmuls of the weights' gradients.
        sent_s = _reduce_s(group.out_axis, group.input_sharding, group.inputs, g)
        link[group.out_axis] += sent_s
        hides = g.schedule.hides_backward
        exposed[group.out_axis] += together_s(weight_s, sent_s, g.slowdown) - weight_s if hides else sent_s
        if not g.keep_inputs:
            # The second gather of the input overlaps the matmuls of its gradient.
            again_s = _gather_s(group.out_axis, group.input_sharding, group.inputs, g)
            link[group.out_axis] += again_s
            exposed[group.out_axis] += together_s(input_s, again_s, g.slowdown) - input_s
    return Pass(matmul, 0.0, 0.0, link, exposed)


def _by_sharding(group: Linears) -> list[tuple[Sharding, list[float]]]:
    """Outputs by their sharding: one collective serves all that are sharded alike."""
    found: dict[Sharding, list[float]] = {}
    for features, sharding in zip(group.outputs, group.output_shardings, strict=True):
        found.setdefault(sharding, []).append(features)
    return list(found.items())


def _gather_s(axis: str, sharding: Sharding, features: float, given: Given) -> float:
    if sharding == "whole":
        return 0.0
    return given.send("all_gather", axis, given.schedule.weight_bytes * given.tokens * features)


def _reduce_s(axis: str, sharding: Sharding, features: float, given: Given) -> float:
    kind: Kind = "all_reduce" if sharding == "whole" else "reduce_scatter"
    return given.send(kind, axis, given.schedule.weight_bytes * given.tokens * features)


def _matmul_s(features: float, sharding: Sharding, group: Linears, given: Given, which: str) -> float:
    """One linear's matmul; what is sharded by features arrives, and leaves, in one piece for each rank."""
    ranks = {"y": given.y, "x": given.x}
    pieces_in = ranks[group.out_axis] if group.input_sharding == "features" else 1
    pieces_out = ranks[group.in_axis] if sharding == "features" else 1
    n, k, tokens = features / pieces_out, group.inputs / pieces_in, given.tokens
    sizes = {"forward": (tokens, n, k), "input": (tokens, k, n), "weight": (n, k, tokens)}[which]
    float8 = given.schedule.float8 and which != "weight"
    adapter_s = _adapter_s(features, group, given, which) if group.adapter_rank else 0.0
    if which == "weight" and not group.is_trained:
        return adapter_s
    each_s = matmul_s(1, *sizes, given.device, given.kernels.matmul_share, float8=float8)
    if group.is_packed and which != "weight":
        adapter_s += memory_s(UNPACKED_BYTES * features * group.inputs, given.device)
    return pieces_in * pieces_out * each_s + adapter_s


def _adapter_s(features: float, group: Linears, given: Given, which: str) -> float:
    """The products of a linear's adapter (`parallel/product/linear_op.py`)."""
    r, tokens, inputs = group.adapter_rank, given.tokens, group.inputs
    sizes: dict[str, list[tuple[float, float, float]]] = {
        "forward": [(tokens, r, inputs), (tokens, features, r)],
        "input": [(tokens, r, features), (tokens, inputs, r)],
        "weight": [(r, inputs, tokens), (tokens, r, inputs), (features, r, tokens)],
    }
    return sum(matmul_s(1, *one, given.device, given.kernels.matmul_share) for one in sizes[which])


def _replicas(workload: Workload, y: int, x: int, *, by_tokens: bool) -> list[tuple[str, float]]:
    """(axis, elements) of weights that several ranks use for other tokens, heads or rows: their gradients are summed."""
    w = workload
    if w.lora_rank:
        return _adapter_replicas(w, y, x)
    # Each x rank beyond the key/value heads holds all of their rows and has the gradient of its own.
    kv_rows = [("x", w.hidden * w.kv_features / y)] * 2 if x > w.kv_heads else []
    if not by_tokens:
        return kv_rows
    has_qkv_bias = w.bias or w.qkv_bias
    if x > w.kv_heads and has_qkv_bias:
        kv_rows += [("x", float(w.kv_features))] * 2
    # Gains and biases of the norms; biases of o and down.
    rows = [("x", w.hidden / y)] * (6 if w.bias else 2)
    columns: list[tuple[str, float]] = []
    of_q, of_kv = head_shardings(w, y, x, by_tokens=by_tokens)
    if has_qkv_bias:
        columns += [("y", w.q_features / x)] * (of_q != "whole")
        columns += [("y", w.kv_features / min(x, w.kv_heads))] * (2 * (of_kv != "whole"))
    if w.bias:
        columns += [("y", w.ffn / x)] * (2 if w.gated else 1)
    if w.experts is not None:  # the router
        rows.append(("x", float(w.hidden * w.experts.number)))
    return rows + columns + kv_rows


def _adapter_replicas(w: Workload, y: int, x: int) -> list[tuple[str, float]]:
    """The gradient of A is a sum over the axis of the output's features, that of B over that of the input's."""
    kv = w.kv_features / min(x, w.kv_heads)
    hidden, inner, q = w.hidden / y, w.ffn / x, w.q_features / x
    found: list[tuple[str, float]] = []
    for out in (q, kv, kv, *([inner] * (2 if w.gated else 1))):
        found += [("x", w.lora_rank * hidden), ("y", w.lora_rank * out)]
    for into in (q, inner):
        found += [("y", w.lora_rank * into), ("x", w.lora_rank * hidden)]
    return found + [("x", w.lora_rank * float(w.kv_features))] * (2 if x > w.kv_heads else 0)


def block_passes(workload: Workload, length: int, given: Given) -> tuple[Pass, Pass, Pass]:
    """A block's forward, its backward, and its forward as backward runs it again.

    With sequence-parallel activations the tokens are those that all x and y ranks share.
    """
    w, (tokens, y, x, device, kernels, schedule, slowdown, send, by_tokens, *_) = workload, given
    groups = groups_of(w, y, x, by_tokens=by_tokens)
    forward, backward = _forward(groups, given), _backward(groups, given)
    again = _again(groups, given) if w.experts is None else _forward(groups, given)
    of_q, of_kv = head_shardings(w, y, x, by_tokens=by_tokens)
    parts = x * y if of_q == "features" else x
    is_fused = schedule.attention == "flash"
    core = attention_core_s(
        tokens,
        length,
        (w.q_features + w.o_features) / 2 / parts,
        w.heads / parts,
        device,
        kernels,
        fused=is_fused,
    )
    over_x = schedule.cuts_tokens_over_x
    moved = block_bytes(w, y, x, schedule.elementwise, cuts_tokens_over_x=over_x, by_tokens=by_tokens)
    elementwise = [memory_s(kernels.memory_passes * tokens * m, device) for m in moved]
    forward = forward._replace(attention_s=core[0], elementwise_s=elementwise[0])
    again = again._replace(attention_s=core[0], elementwise_s=elementwise[0])
    backward = backward._replace(attention_s=core[1], elementwise_s=elementwise[1])
    # In a block with experts, what is computed last depends on the family: shared experts run again in full.
    run_again = groups[:-1] if schedule.stops_early and w.experts is None else groups
    if schedule.float8:
        forward = _with_casts(forward, casts_s(groups, given, is_backward=False))
        again = _with_casts(again, casts_s(run_again, given, is_backward=False))
        backward = _with_casts(backward, casts_s(groups, given, is_backward=True))
    if w.experts is not None:
        of_experts = experts_passes(w, given)
        forward, backward, again = (
            _with_experts(one, more) for one, more in zip((forward, backward, again), of_experts, strict=True)
        )
    if schedule.interleaves:
        forward, backward, again = (_with_batch_split(one, slowdown) for one in (forward, backward, again))
    if schedule.float8:
        for one, its, is_backward in (
            (forward, groups, False),
            (again, run_again, False),
            (backward, groups, True),
        ):
            for axis, payload_bytes in shared_scales(its, given, is_backward=is_backward):
                _add_exposed(one, axis, send("all_reduce", axis, payload_bytes))
        if x > w.kv_heads:  # the gradients of heads that several x ranks have are summed before they are cast
            _add_exposed(
                backward, "x", 2 * send("all_reduce", "x", schedule.weight_bytes * tokens * w.kv_features)
            )
    if of_q == "features" and of_kv == "whole":
        # Several y ranks use one key/value head: the gradients of k and v are summed over y.
        kv = w.kv_features / min(x, w.kv_heads)
        shared_s = 2 * send("all_reduce", "y", schedule.weight_bytes * tokens * kv)
        _add_exposed(backward, "y", shared_s)
    # Each alone and in every micro-batch, as with FSDP2; streamed weights sum those of all blocks together, once a step.
    for axis, elements in _replicas(w, y, x, by_tokens=by_tokens):
        replica_s = send("all_reduce", axis, schedule.gradient_bytes * elements)
        _add_exposed(backward, axis, replica_s)
    host_s = kernels.host_us * 1e-6
    forward, backward, again = (
        _at_least(one, host) for one, host in ((forward, host_s), (backward, 2 * host_s), (again, host_s))
    )
    for one in (forward, backward, again):  # the statistics of the norms; nothing hides them
        _add_exposed(one, "y", 2 * send("all_reduce", "y", 4 * tokens / (x if by_tokens else 1)))
    return forward, backward, again


def _again(groups: list[Linears], given: Given) -> Pass:
    """The linears of a recomputed forward; backward needs the input of the last ones, and not their output."""
    if not given.schedule.stops_early:
        return _forward(groups, given)
    *most, last = groups
    one = _forward(most, given)
    if given.keep_inputs:
        _add_exposed(one, last.out_axis, _gather_s(last.out_axis, last.input_sharding, last.inputs, given))
    return one


def _with_experts(one: Pass, more: ExpertsTime) -> Pass:
    for axis, seconds in more.link_s.items():
        _add_exposed(one, axis, seconds)
    matmul, elementwise = one.matmul_s + more.matmul_s, one.elementwise_s + more.elementwise_s
    return one._replace(matmul_s=matmul, elementwise_s=elementwise)


def _with_casts(one: Pass, seconds: float) -> Pass:
    return one._replace(elementwise_s=one.elementwise_s + seconds)


def _add_exposed(one: Pass, axis: str, seconds: float) -> None:
    """Add a collective that nothing hides."""
    for of_axis in (one.link_s, one.exposed_s):
        of_axis[axis] = of_axis.get(axis, 0.0) + seconds


def _with_batch_split(one: Pass, slowdown: Slowdown) -> Pass:
    """A pass whose communication overlaps the computation of the other half-batch."""
    total_s = sum(one.link_s.values())
    if total_s == 0.0:
        return one
    shown = (together_s(one.compute_s, total_s, slowdown) - one.compute_s) / total_s
    exposed_s = {axis: min(one.exposed_s[axis], shown * one.link_s[axis]) for axis in one.link_s}
    return one._replace(exposed_s=exposed_s)


def _at_least(one: Pass, host_s: float) -> Pass:
    """A pass, at least as long as its launches; the device's wait for them counts as element-wise work."""
    waiting_s = max(0.0, host_s - one.compute_s - sum(one.exposed_s.values()))
    return one._replace(elementwise_s=one.elementwise_s + waiting_s)


def ends_pass(workload: Workload, given: Given) -> Pass:
    """Embedding, head and loss, forward and backward together."""
    w, (tokens, y, x, device, _, schedule, _, send, by_tokens, *_) = workload, given
    columns = -(-w.vocabulary // x)  # of the head on each x rank
    between: Sharding = "tokens" if by_tokens else "whole"
    head = [Linears(w.hidden / y, (columns,), "y", "x", between, (between,), is_trained=not w.lora_rank)]
    own_y, own_x = (y, x) if by_tokens else (1, 1)  # ranks that hold other tokens
    moved_bytes = tokens * ends_bytes(w, y, columns, schedule.elementwise, by_tokens_over=(own_y, own_x))
    moved_bytes += head_sum_bytes(w, tokens, y, x, schedule.elementwise)
    # Nothing hides these. The lookup in a vocabulary that is sharded over x is a sum; the loss needs a maximum and two sums.
    looked_up_bytes = schedule.weight_bytes * tokens * w.hidden / y
    alone_x_s = send("all_reduce", "x", 4 * tokens / own_y) + send("all_reduce", "x", 8 * tokens / own_y)
    alone_y_s = 0.0
    if by_tokens:
        alone_x_s += send("reduce_scatter", "x", looked_up_bytes) + send("all_gather", "x", looked_up_bytes)
        # The gradients of the last norm and of positions, and the norm's statistics, as in a block.
        if not w.lora_rank:
            alone_x_s += (2 if w.bias else 1) * send(
                "all_reduce", "x", schedule.gradient_bytes * w.hidden / y
            )
        if w.positions and not w.lora_rank:
            alone_x_s += send("all_reduce", "x", schedule.gradient_bytes * w.positions * w.hidden / y)
        alone_y_s = 2 * send("all_reduce", "y", 4 * tokens / x)
    else:
        alone_x_s += send("all_reduce", "x", looked_up_bytes)
    given = given._replace(schedule=replace(schedule, float8=False))  # the head is not in a block
    # Its gradients are computed in forward, with the loss (parallel/loss/chunked.py): its input is not gathered again.
    one, backward = _forward(head, given), _backward(head, given._replace(keep_inputs=True))
    for axis, alone_s in (("x", alone_x_s), ("y", alone_y_s)):
        one.link_s[axis] += backward.link_s[axis] + alone_s
        one.exposed_s[axis] += backward.exposed_s[axis] + alone_s
    return one._replace(
        matmul_s=one.matmul_s + backward.matmul_s, elementwise_s=memory_s(moved_bytes, device)
    )
