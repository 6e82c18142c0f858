"""Micro-batches are alike, except for the first, which allocates gradients, and the last, which sends them: three are enough."""

from __future__ import annotations

from itertools import pairwise

from fourfold.dry_run.events import Trace

TRACED = 3


def with_repeated(trace: Trace, times: int) -> Trace:
    """The trace of `TRACED` micro-batches with that of the second one inserted ``times`` more."""
    if not times:
        return trace
    phases = [event.phase for event in trace.events]
    starts = [i for i, (before, phase) in enumerate(pairwise(["", *phases])) if phase == "forward" != before]
    assert len(starts) == TRACED
    _, second, last = starts
    # What a micro-batch frees at its end is a change of the first event of the next one, so that is the last one's.
    like = [trace.changes[last], *trace.changes[second + 1 : last]]
    events = [*trace.events[:last], *(list(trace.events[second:last]) * times), *trace.events[last:]]
    changes = [*trace.changes[:last], *(like * times), *trace.changes[last:]]
    return Trace(events, changes, trace.before)
