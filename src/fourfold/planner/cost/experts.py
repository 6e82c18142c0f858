"""Time of the experts of one block, forward and backward, beside attention and shared experts: cut, or owned by ranks.

    cut      features gathered over y and tokens over x; every rank has a row for each choice of these tokens, and f/(x*y) of the
             inner features of all E experts; reduce-scatter over x and y
    owned    a row for each choice goes to the rank of the axes A that owns its expert, by an all-to-all, and back; E/g experts on each
             of g ranks. With A = (z,) this is inside of what is around cut experts. With x in A each x rank sends its own tokens, and
             inner features are sharded over y alone

The step takes as long as the rank with most rows, which are ``load`` times the mean. Nothing hides an all-to-all, because it waits for the
router, and what follows waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

from fourfold.planner.cost.compute import matmul_s, memory_s
from fourfold.planner.cost.elementwise import Moved
from fourfold.planner.cost.linears import Given
from fourfold.planner.inputs.workload import Workload

# For each feature of a row, and of a row's inner features: gather, gate, weight, put back, add up. Eager: the sums over the operators of
# a dry run.
_ROWS = {"fused": Moved(8, 8), "eager": Moved(18, 20), "compiled": Moved(18, 20)}
_INNER = {"fused": Moved(6, 12), "eager": Moved(10, 42), "compiled": Moved(10, 42)}
# Of owned experts: rows gathered by rank, put back, weighted and added up where the tokens are from.
_SENT_ROWS = {"fused": Moved(8, 8), "eager": Moved(22, 24), "compiled": Moved(22, 24)}
_ROUTER = Moved(28, 40)  # for each token and expert: logits, their softmax, in fp32
# For each element of an expert that a rank owns, in a micro-batch: two casts, and its gradient, which is added up.
OWNED_BYTES = 26
_COUNT_BYTES = 8


class ExpertsTime(NamedTuple):
    """Seconds of one pass; link seconds by axis, all of which show."""

    matmul_s: float
    elementwise_s: float
    link_s: dict[str, float]


def experts_passes(w: Workload, given: Given) -> tuple[ExpertsTime, ExpertsTime, ExpertsTime]:
    """Forward, backward, and forward as backward runs it again."""
    e, g = w.experts, given
    assert e is not None
    owners = given.owners
    owns_x = owners is not None and "x" in owners.axes
    cuts = g.y if owns_x else g.y * g.x
    held = e.number / (owners.ranks if owners else 1)  # experts on a rank
    tokens = g.tokens / g.x if owns_x else g.tokens
    rows = e.rows(tokens) * (g.load if owners else 1.0)
    h, inner = w.hidden, e.features / cuts
    up = (2 if w.gated else 1) * inner
    own_tokens = g.tokens / g.x if g.by_tokens else g.tokens

    def product_s(m: float, n: float, k: float) -> float:
        return matmul_s(max(1, round(held)), m, n, k, g.device, g.kernels.matmul_share)

    each = rows / held
    into_s, out_s = product_s(each, up, h), product_s(each, h, inner)
    router_s = matmul_s(1, own_tokens, e.number, h, g.device, g.kernels.matmul_share)
    backward_s = product_s(each, h, up) + product_s(up, h, each)
    backward_s += product_s(each, inner, h) + product_s(h, inner, each) + 2 * router_s

    def elementwise_s(way: int) -> float:
        kind = g.schedule.elementwise
        moved = (
            rows * (_ROWS[kind][way] * h + _INNER[kind][way] * inner) + own_tokens * _ROUTER[way] * e.number
        )
        if owners is not None:
            moved += e.rows(tokens) * _SENT_ROWS[kind][way] * h
        return memory_s(g.kernels.memory_passes * moved, g.device)

    around = _around(w, given, owns_x=owns_x)
    forth, sizes = 0.0, 0.0
    if owners is not None:
        payload_bytes = g.schedule.weight_bytes * e.rows(tokens) * g.load * h
        forth = g.send("all_to_all", "experts", payload_bytes)
        sizes = g.send("all_to_all", "experts", _COUNT_BYTES * e.number)

    def links(share_of_around: float, all_to_alls: float, counts: int) -> dict[str, float]:
        found = {axis: share_of_around * seconds for axis, seconds in around.items()}
        if owners is not None:
            found[owners.link] = found.get(owners.link, 0.0) + all_to_alls * forth + counts * sizes
        return found

    # Recomputed up to what backward needs: not the result.
    stops = g.schedule.stops_early
    return (
        ExpertsTime(into_s + out_s + router_s, elementwise_s(0), links(1, 2, 1)),
        ExpertsTime(backward_s, elementwise_s(1), links(1, 2, 0)),
        ExpertsTime(
            into_s + router_s + (0.0 if stops else out_s),
            elementwise_s(0),
            links(0.5 if stops else 1, 1 if stops else 2, 1),
        ),
    )


def _around(w: Workload, given: Given, *, owns_x: bool) -> dict[str, float]:
    """Seconds on y and x of the gather before experts that are cut, and of the sum behind them."""
    g, wide = given, given.schedule.weight_bytes
    if g.x * g.y == 1:
        return {}
    whole_bytes = wide * g.tokens * w.hidden
    if g.by_tokens:
        over_y = whole_bytes / g.x
        if owns_x:
            return {"y": g.send("all_gather", "y", over_y) + g.send("reduce_scatter", "y", over_y)}
        return {
            "y": g.send("all_gather", "y", over_y) + g.send("reduce_scatter", "y", over_y),
            "x": g.send("all_gather", "x", whole_bytes) + g.send("reduce_scatter", "x", whole_bytes),
        }
    return {
        "y": g.send("all_gather", "y", whole_bytes)
        + g.send("reduce_scatter", "y", whole_bytes / (g.x if owns_x else 1)),
        # Where x ranks take their part of the tokens, all have the results in the end.
        "x": g.send("all_gather", "x", whole_bytes / g.y)
        if owns_x
        else g.send("all_reduce", "x", whole_bytes / g.y),
    }
