"""One transformer block on the grid, forward and backward: what it computes, what it sends on x and y, what shows.

The order is that of `parallel/linear.py`. Each group of linears with one input makes one all-reduce of its output over
the axis that cuts its input, and one of its input's gradient over the axis that cuts its output. Heads and inner features
live on x: the core of attention and the activation function are done by every rank of y again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fourfold.planner.cost.collective import Kind
from fourfold.planner.cost.compute import Kernels, attention_core_s, matmul_s, memory_s
from fourfold.planner.cost.elementwise import block_bytes, ends_bytes
from fourfold.planner.inputs.cluster import Device, Slowdown
from fourfold.planner.inputs.layout import Schedule
from fourfold.planner.inputs.workload import Workload

Send = Callable[[Kind, str, float], float]  # (kind, axis, payload bytes) -> seconds


class Given(NamedTuple):
    """What every part of a step is timed for."""

    tokens: float
    y: int
    x: int
    device: Device
    kernels: Kernels
    schedule: Schedule
    slowdown: Slowdown
    send: Send
    keep_inputs: bool = True  # or gather them again in backward, where activations are token-sharded

    def all_reduce(self, axis: str, payload_bytes: float) -> float:
        return self.send("all_reduce", axis, payload_bytes)


class Pass(NamedTuple):
    """One way through a block, or through the head."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    link_x_s: float
    link_y_s: float
    exposed_x_s: float
    exposed_y_s: float

    @property
    def compute_s(self) -> float:
        return self.matmul_s + self.attention_s + self.elementwise_s


class Linears(NamedTuple):
    """A group of linears that read one input."""

    inputs: float
    outputs: tuple[float, ...]
    in_axis: str
    out_axis: str


Linked = tuple[float, dict[str, float], dict[str, float]]  # (matmul, link by axis, exposed by axis) seconds


def together_s(compute_s: float, communication_s: float, slowdown: Slowdown) -> float:
    """Both at once, each the slower for it, until the shorter is done (Galvatron's two coefficients)."""
    slow_compute_s = slowdown.compute * compute_s
    slow_communication_s = slowdown.communication * communication_s
    if slow_communication_s > slow_compute_s:
        return slow_compute_s + communication_s - slow_compute_s / slowdown.communication
    return slow_communication_s + compute_s - slow_communication_s / slowdown.compute


def groups_of(workload: Workload, y: int, x: int) -> list[Linears]:
    w = workload
    q, kv, hidden, inner = w.q_features / x, w.kv_features / min(x, w.kv_heads), w.hidden / y, w.ffn / x
    return [
        Linears(hidden, (q, kv, kv), "y", "x"),
        Linears(q, (hidden,), "x", "y"),
        Linears(hidden, (inner, inner) if w.gated else (inner,), "y", "x"),
        Linears(inner, (hidden,), "x", "y"),
    ]


def _forward(groups: list[Linears], given: Given) -> Linked:
    g, schedule = given, given.schedule
    matmul, link, exposed = 0.0, {"x": 0.0, "y": 0.0}, {"x": 0.0, "y": 0.0}
    for group in groups:
        own = sum(
            matmul_s(1, g.tokens, n, group.inputs, g.device, g.kernels.matmul_share) for n in group.outputs
        )
        matmul += own
        payload_bytes = schedule.weight_bytes * g.tokens * sum(group.outputs)
        whole_s = g.all_reduce(group.in_axis, payload_bytes)
        if whole_s == 0.0:
            continue
        chunks = max(1, min(schedule.forward_chunks, int(payload_bytes // schedule.chunk_bytes)))
        part_s = g.all_reduce(group.in_axis, payload_bytes / chunks)
        link[group.in_axis] += chunks * part_s
        # The first part is multiplied alone, the last is sent alone; between, each behind the next's matmul.
        between_s = (chunks - 1) * together_s(own / chunks, part_s, g.slowdown)
        exposed[group.in_axis] += max(0.0, own / chunks + between_s + part_s - own)
    return matmul, link, exposed


def _backward(groups: list[Linears], given: Given) -> Linked:
    g = given
    matmul, link, exposed = 0.0, {"x": 0.0, "y": 0.0}, {"x": 0.0, "y": 0.0}
    share = g.kernels.matmul_share
    for group in groups:
        input_s = sum(matmul_s(1, g.tokens, group.inputs, n, g.device, share) for n in group.outputs)
        weight_s = sum(matmul_s(1, n, group.inputs, g.tokens, g.device, share) for n in group.outputs)
        matmul += input_s + weight_s
        sent_s = g.all_reduce(group.out_axis, g.schedule.weight_bytes * g.tokens * group.inputs)
        link[group.out_axis] += sent_s
        if g.schedule.hides_backward:
            exposed[group.out_axis] += together_s(weight_s, sent_s, g.slowdown) - weight_s
        else:
            exposed[group.out_axis] += sent_s
    return matmul, link, exposed


def block_passes(workload: Workload, length: int, given: Given) -> tuple[Pass, Pass]:
    """A block's forward and backward; a recomputed forward is another forward."""
    w, (tokens, y, x, device, kernels, schedule, slowdown, _, _) = workload, given
    groups = groups_of(w, y, x)
    matmul_f, link_f, exposed_f = _forward(groups, given)
    matmul_b, link_b, exposed_b = _backward(groups, given)
    q = w.q_features / x
    core_f, core_b = attention_core_s(
        tokens, length, q, w.heads / x, device, kernels, fused=schedule.attention == "flash"
    )
    moved = block_bytes(w, y, x, schedule.elementwise, cuts_tokens_over_x=schedule.cuts_tokens_over_x)
    elementwise_f, elementwise_b = (memory_s(kernels.memory_passes * tokens * m, device) for m in moved)
    if schedule.interleaves:
        exposed_f = in_turns(matmul_f + core_f + elementwise_f, link_f, exposed_f, slowdown)
        exposed_b = in_turns(matmul_b + core_b + elementwise_b, link_b, exposed_b, slowdown)
    statistics_s = 2 * given.all_reduce("y", 4 * tokens)  # two norms; nothing hides them
    if x > w.kv_heads:
        # Every x rank holds all key/value rows and has the gradient of its own: k's and v's are summed over x.
        replica_s = 2 * given.all_reduce("x", schedule.gradient_bytes * w.hidden * w.kv_features / y)
        link_b["x"] += replica_s
        exposed_b["x"] += replica_s
    forward = floored(
        matmul_f, core_f, elementwise_f, link_f, exposed_f, statistics_s, kernels.host_us * 1e-6
    )
    backward = floored(
        matmul_b, core_b, elementwise_b, link_b, exposed_b, statistics_s, 2 * kernels.host_us * 1e-6
    )
    return forward, backward


def in_turns(
    compute_s: float, link: dict[str, float], exposed: dict[str, float], slowdown: Slowdown
) -> dict[str, float]:
    """What shows where the other half's work, a whole block's, is there to hide it."""
    total_s = link["x"] + link["y"]
    if total_s == 0.0:
        return exposed
    shown = (together_s(compute_s, total_s, slowdown) - compute_s) / total_s
    return {axis: min(exposed[axis], shown * link[axis]) for axis in link}


def floored(
    matmul: float,
    core: float,
    elementwise: float,
    link: dict[str, float],
    exposed: dict[str, float],
    statistics_s: float,
    host_s: float,
) -> Pass:
    """A pass is never shorter than its launches take: what the device waits for them counts as element-wise work."""
    waiting_s = max(0.0, host_s - matmul - core - elementwise - exposed["x"] - exposed["y"])
    return Pass(
        matmul,
        core,
        elementwise + waiting_s,
        link["x"],
        link["y"] + statistics_s,
        exposed["x"],
        exposed["y"] + statistics_s,
    )


def ends_pass(workload: Workload, given: Given) -> Pass:
    """Embedding, head and loss, forward and backward together."""
    w, g = workload, given
    columns = columns_of(w, g.x)
    head = [Linears(w.hidden / g.y, (columns,), "y", "x")]
    moved_bytes = g.tokens * ends_bytes(w, g.y, columns, g.schedule.elementwise)
    # The lookup in a vocabulary that is cut over x is a sum; then the loss's maximum and its two sums.
    alone_s = g.all_reduce("x", g.schedule.weight_bytes * g.tokens * w.hidden / g.y)
    alone_s += g.all_reduce("x", 4 * g.tokens) + g.all_reduce("x", 8 * g.tokens)
    return ends(
        _forward(head, g), _backward(head, g), memory_s(moved_bytes, g.device), {"x": alone_s, "y": 0.0}
    )


def columns_of(workload: Workload, x: int) -> int:
    """Of the head, on each x rank."""
    return -(-workload.vocabulary // x)


def ends(forward: Linked, backward: Linked, elementwise_s: float, alone_s: dict[str, float]) -> Pass:
    """The head's two ways together, with what is sent ``alone`` on each axis: nothing hides it."""
    (matmul_f, link_f, exposed_f), (matmul_b, link_b, exposed_b) = forward, backward
    return Pass(
        matmul_f + matmul_b,
        0.0,
        elementwise_s,
        link_f["x"] + link_b["x"] + alone_s["x"],
        link_f["y"] + link_b["y"] + alone_s["y"],
        exposed_f["x"] + exposed_b["x"] + alone_s["x"],
        exposed_f["y"] + exposed_b["y"] + alone_s["y"],
    )
