"""A predicted step as a trace for chrome://tracing or ui.perfetto.dev: computation, waits, and a track for each axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.mesh.axes import AXES

if TYPE_CHECKING:
    from fourfold.planner.simulate import Simulated


def chrome_trace(step: Simulated, title: str) -> dict[str, Any]:
    """The trace, as what a JSON file of it holds; times are microseconds.

    Example:
        >>> from fourfold.planner.simulate import Simulated, Span
        >>> step = Simulated(2.0, 1.0, {}, {}, (Span("z", "all_gather w", 0.5, 1.5),))
        >>> chrome_trace(step, "a step")["traceEvents"][-1]["dur"]
        1000000.0
    """
    used = [
        track
        for track in ("compute", "wait", *reversed(AXES), "host")
        if any(span.track == track for span in step.spans)
    ]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"{title}: predicted"}}
    ]
    for number, track in enumerate(used):
        name = f"{track} axis" if track in AXES else track
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number, "args": {"sort_index": number}})  # fmt: skip
    for span in step.spans:
        times = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
        place = {"cat": span.track, "pid": 1, "tid": used.index(span.track)}
        events.append({"ph": "X", "name": span.name, **place, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
