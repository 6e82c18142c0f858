"""Where FSDP2's waits take effect on CUDA.

On CPU FSDP2 waits for each collective where it starts it. On CUDA the host goes on, and streams wait for each other:

    gather in forward     starts while the block before computes, for nothing on the compute stream holds it up
    gather in backward    starts a block ahead, and its copy into the weights of the block waits for it
    reduce-scatter        holds up the next one's start, the last of them the end of backward
    all-reduce over data  follows its reduce-scatter on another stream; the end of backward waits for all

as `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` has it (torch 2.13.0). No GPU has run this.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fourfold.dry_run.events import Event, Operation, Start, Wait

_COPY = "fsdp.split_with_sizes_copy.default"  # what a gather brought, into the weights


def on_streams(events: Sequence[Event]) -> list[Event]:
    """The events of a step with FSDP2 weights in the order in which CUDA's streams know them."""
    places: list[tuple[float, Event]] = [(float(i), event) for i, event in enumerate(events)]
    pairs = _pairs(events)
    gathers = [pair for pair in pairs if _is(events[pair[0]], "weight")]
    scatters = [pair for pair in pairs if _is(events[pair[0]], "gradient", "reduce_scatter")]
    sums = [pair for pair in pairs if _is(events[pair[0]], "gradient", "all_reduce", "data")]

    for (_, before), (start, _) in pairwise(gathers):
        if events[start].phase == events[before].phase == "forward":
            places[start] = (before + 0.5, events[start])
    copies = [i for i, event in enumerate(events) if isinstance(event, Operation) and event.name == _COPY]
    for start, wait in gathers:
        if events[start].phase != "forward" and (needed := bisect(copies, wait)) < len(copies):
            places[wait] = (copies[needed] - 0.5, events[wait])
    backward_ends = _ends_of_backward(events)
    for n, (_, wait) in enumerate(scatters):
        end = backward_ends[bisect(backward_ends, wait)]
        after = scatters[n + 1][0] - 0.25 if n + 1 < len(scatters) else end
        places[wait] = (min(after, end), events[wait])
    for start, wait in sums:
        places[wait] = (backward_ends[bisect(backward_ends, wait)], events[wait])
        if scatters and scatters[0][1] < start:
            sent = events[start]
            assert isinstance(sent, Start)
            places[start] = (float(start), replace(sent, follows="z"))
    return [event for _, event in sorted(places, key=lambda place: place[0])]


def _pairs(events: Sequence[Event]) -> list[tuple[int, int]]:
    """(start, wait) of each collective that is waited for, in the order of starts."""
    under_way: dict[tuple[str, ...], deque[int]] = defaultdict(deque)
    pairs = []
    for i, event in enumerate(events):
        if isinstance(event, Operation):
            continue
        words = (event.axis, event.kind, event.purpose, event.module)
        if isinstance(event, Start):
            under_way[words].append(i)
        elif under_way[words]:
            pairs.append((under_way[words].popleft(), i))
    return sorted(pairs)


def _is(event: Event, purpose: str, kind: str = "all_gather", axis: str = "z") -> bool:
    wanted = (purpose, kind, axis)
    return isinstance(event, Start | Wait) and (event.purpose, event.kind, event.axis) == wanted


def _ends_of_backward(events: Sequence[Event]) -> list[float]:
    """Right before the first event after each micro-batch's backward; the last is after all events."""
    is_backward = [event.phase in ("backward", "recompute") for event in events]
    return [*(i - 0.1 for i in range(1, len(events)) if is_backward[i - 1] > is_backward[i]), len(events)]
