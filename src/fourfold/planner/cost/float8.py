"""What float8 adds to a block: operands are cast to e4m3, and ranks that have parts of a row share its scale.

As in `parallel/float8/operands.py`: I and W are cast in forward, dO and W in backward. The matmuls themselves are in `block.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.planner.cost.compute import memory_s
from fourfold.planner.cost.linears import Given, Linears
from fourfold.planner.inputs.workload import Workload

MULTIPLE = 16  # of features, as matmuls of e4m3 need them (parallel/float8/choice.py)


def check_float8(workload: Workload) -> None:
    """Do all linears of its blocks compute in float8?"""
    w = workload
    widths = {"hidden_size": w.hidden, "heads x head_dim": w.q_features, "intermediate_size": w.ffn}
    widths["num_key_value_heads x head_dim"] = w.kv_features
    for name, width in widths.items():
        if width % MULTIPLE:
            raise ValueError(
                f"{name}={width} of {w.name} is not a multiple of {MULTIPLE}: such linears do not compute in float8, and the formulas "
                "are for blocks in which all do; use float8='none'"
            )


def why_not_float8(groups: Sequence[Linears], y: int, x: int) -> str | None:
    """Why these pieces cannot be multiplied in e4m3; None if they can."""
    ranks = {"y": y, "x": x}
    for group in groups:
        pieces = [(group.inputs, group.out_axis, group.input_sharding)]
        pieces += [(n, group.in_axis, s) for n, s in zip(group.outputs, group.output_shardings, strict=True)]
        for features, axis, sharding in pieces:
            at_once = features / (ranks[axis] if sharding == "features" else 1)
            if at_once % MULTIPLE:
                return (
                    f"a matmul would have {at_once:g} features, and in float8 it needs a multiple of {MULTIPLE}; use a smaller x or y, "
                    "or float8='none'"
                )
    return None


def casts_s(groups: Sequence[Linears], given: Given, *, is_backward: bool) -> float:
    """Seconds of largest magnitudes and casts: of I and W, or of dO and W."""
    elements = 0.0
    for group in groups:
        outputs = sum(group.outputs)
        elements += given.tokens * (outputs if is_backward else group.inputs) + group.inputs * outputs
    wide = given.schedule.weight_bytes
    # Read twice and written once in e4m3; as single operators, what is scaled is written and read in between.
    moved = (4 if given.schedule.elementwise == "eager" else 2) * wide + 1
    return memory_s(moved * elements, given.device)


def shared_scales(groups: Sequence[Linears], given: Given, *, is_backward: bool) -> list[tuple[str, float]]:
    """(axis, bytes) of each all-reduce of largest magnitudes."""
    found: list[tuple[str, float]] = []
    for group in groups:
        members = len(group.outputs)
        if is_backward:  # of whole weights; then with the rows of the gradients
            found += [(group.in_axis, members), (group.out_axis, members * (1 + given.tokens))]
        else:
            found.append((group.in_axis, given.tokens + sum(group.outputs)))
    return [(axis, given.schedule.weight_bytes * count) for axis, count in found]
