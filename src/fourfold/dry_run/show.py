"""A dry run as tables: memory, collectives, work."""

from __future__ import annotations

import re

from fourfold.dry_run.events import CATEGORIES, Operation, Start, Trace, Wait
from fourfold.text_tables import as_text, table


def show(title: str, trace: Trace) -> str:
    """The tables, as text."""
    peak = trace.peak
    event = trace.events[min(peak.event, len(trace.events) - 1)]
    where = f"in {event.phase} at {_name(event)} of {event.module or 'the model'}"
    memory = [
        (category, _gib(peak.by_category[category]), _gib(trace.before.get(category, 0)))
        for category in CATEGORIES
    ]
    return as_text(
        120,
        f"{title}\n",
        table(
            f"memory of tensors: {_gib(peak.bytes)} at most, {where}",
            ("category", "at the peak", "between steps"),
            memory,
        ),
        table(
            "collectives and copies of a step",
            ("axis", "kind", "for", "ranks", "calls", "bytes"),
            _collectives(trace),
        ),
        table(
            "work of a step",
            ("phase", "matmuls", "FLOPs", "attention FLOPs", "bytes of the rest"),
            _work(trace),
        ),
    )


def _collectives(trace: Trace) -> list[tuple[str, ...]]:
    total: dict[tuple[str, str, str, int], tuple[int, float]] = {}
    for event in trace.events:
        if isinstance(event, Start):
            key = (event.axis, event.kind, event.purpose, event.ranks)
            calls, size = total.get(key, (0, 0.0))
            total[key] = (calls + 1, size + event.payload_bytes)
    return [
        (axis, kind, purpose, str(ranks), str(calls), _gib(size))
        for (axis, kind, purpose, ranks), (calls, size) in total.items()
    ]


def _work(trace: Trace) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for phase in dict.fromkeys(event.phase for event in trace.events):
        operations = [e for e in trace.events if isinstance(e, Operation) and e.phase == phase]
        matmuls = [o for o in operations if o.work == "matmul"]
        attention = sum(o.flops for o in operations if o.work == "attention")
        rest = sum(o.bytes_moved for o in operations if o.work == "memory")
        flops = sum(o.flops for o in matmuls)
        rows.append((phase, str(len(matmuls)), f"{flops:.3e}", f"{attention:.3e}", _gib(rest)))
    return rows


def _name(event: Operation | Start | Wait) -> str:
    if isinstance(event, Operation):
        return re.sub(r"^aten\.|\.default$", "", event.name)
    return f"{event.kind} over {event.axis}"


def _gib(size: float) -> str:
    """Bytes in a readable unit.

    Example:
        >>> _gib(3 * 2**30)
        '3.000 GiB'
    """
    for unit, bytes_each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= bytes_each:
            return f"{size / bytes_each:.3f} {unit}"
    return f"{size:.0f} B"
