"""Simulate a step: its events one after another, computation on one track, the collectives of each axis on another.

A collective begins when it was started and those of its axis before it are over; a wait holds up computation until it is
done. Axes whose collectives use the same link share it: of n that are under way each goes on at 1/n of its rate alone.
While something is in flight, computation and collectives slow each other down by factors. Link time is what a collective
would take alone, exposed time what of it computation stood still for.

All this is exact between events: rates only change where a collective or an operation begins or ends.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from fourfold.dry_run.events import Event, Operation, Start, Track
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.cost.compute import host_copy_s, operation_s
from fourfold.planner.inputs.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a track, from when to when."""

    track: str  # "compute", "wait", or an axis
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulated:
    """A predicted step."""

    step_s: float
    compute_s: float
    link_s: Mapping[Track, float]
    exposed_s: Mapping[Track, float]
    spans: tuple[Span, ...]


def predict(
    events: Iterable[Event],
    shape: tuple[int, int, int, int],
    cluster: Cluster,
    *,
    keep_spans: bool = False,
    seconds_of: Callable[[Operation], float] | None = None,
) -> Simulated:
    """Simulate the events of one rank of a grid ``shape`` = (data, z, y, x) on this cluster.

    ``seconds_of``: the price of an operation, if it is known already.
    """
    inner = inner_ranks(shape)

    def collective(start: Start) -> float:
        if start.kind == "to_host" or start.kind == "to_device":
            return host_copy_s(start.payload_bytes, cluster.device)
        return collective_s(start.kind, start.payload_bytes, start.ranks, inner[start.axis], cluster)

    def link(start: Start) -> str:
        if start.axis == "host":
            return "to the host"
        leaves = start.ranks * inner[start.axis] > cluster.links.devices_per_node
        return "between nodes" if leaves else "inside a node"

    def slow_down(start: Start) -> tuple[float, float]:
        if start.axis == "host":  # by a copy engine, which takes no multiprocessor
            return 1.0, 1.0
        slow = cluster.measured.slowdown(start.ranks, inner[start.axis]) or cluster.slowdown
        return slow.compute, slow.communication

    return simulate(
        events,
        seconds_of or (lambda operation: operation_s(operation, cluster)),
        collective,
        link_of=link,
        slow_down=slow_down,
        keep_spans=keep_spans,
    )


def inner_ranks(shape: tuple[int, int, int, int]) -> dict[Track, int]:
    """How many ranks lie between neighbours along each axis; of z and x together, those of y.

    Example:
        >>> inner_ranks((2, 2, 1, 4))
        {'x': 1, 'y': 4, 'z': 4, 'data': 8, 'sequence': 4, 'zx': 1}
    """
    _, z, y, x = shape
    return {"x": 1, "y": x, "z": x * y, "data": x * y * z, "sequence": x * y, "zx": y}


def simulate(
    events: Iterable[Event],
    seconds_of: Callable[[Operation], float],
    alone_s: Callable[[Start], float],
    *,
    link_of: Callable[[Start], Hashable],
    slow_down: Callable[[Start], tuple[float, float]],
    keep_spans: bool,
) -> Simulated:
    """Simulate the events of a step.

    ``link_of`` names the link that a collective uses, such as the one inside a node or the one between nodes.
    ``slow_down``: how much longer computation takes while this collective is in flight, and how much longer the
    collective while there is computation.
    """
    track = _Tracks()
    under_way: dict[tuple[str, ...], deque[_Flight]] = defaultdict(deque)
    compute_s = 0.0
    link_s: dict[Track, float] = defaultdict(float)
    exposed_s: dict[Track, float] = defaultdict(float)
    spans: list[Span] = []
    for event in events:
        begin_s = track.now_s
        if isinstance(event, Operation):
            track.compute(seconds_of(event))
            compute_s += track.now_s - begin_s
            if keep_spans:
                spans.append(Span("compute", f"{event.name} {event.module}", begin_s, track.now_s))
            continue
        words = (event.axis, event.kind, event.purpose, event.module)
        if isinstance(event, Start):
            flight = _Flight(event, alone_s(event), link_of(event), *slow_down(event))
            link_s[event.axis] += flight.left_s
            under_way[words].append(flight)
            track.start(flight, follows=event.follows)
        elif under_way[words]:
            track.wait_for(under_way[words].popleft())
            if track.now_s > begin_s:
                exposed_s[event.axis] += track.now_s - begin_s
                if keep_spans:
                    name = f"{event.kind} over {event.axis} {event.module}"
                    spans.append(Span("wait", name, begin_s, track.now_s))
    track.wait_for(None)
    if keep_spans:
        spans += [
            Span(f.start.axis, f"{f.start.kind} {f.start.module}", f.first_s, f.end_s) for f in track.landed
        ]
        spans.sort(key=lambda span: span.start_s)
    return Simulated(track.now_s, compute_s, dict(link_s), dict(exposed_s), tuple(spans))


_LEAST_PACE = 0.05  # however many are in flight


@dataclass(eq=False)
class _Flight:
    """A collective under way."""

    start: Start
    left_s: float  # what is left of it, if it were alone
    link: Hashable
    slows_compute: float
    slowed_by_compute: float
    after: _Flight | None = None  # what has to be over before it can begin, though nobody waits
    begin_s: float = 0.0
    end_s: float = math.inf

    @property
    def first_s(self) -> float:
        """When its first byte went."""
        return self.begin_s if self.after is None else max(self.begin_s, self.after.end_s)


@dataclass
class _Tracks:
    """The clock, and what is in flight: for each axis a queue, of which the first one is under way."""

    now_s: float = 0.0
    queues: dict[Track, deque[_Flight]] = field(default_factory=lambda: defaultdict(deque))
    landed: list[_Flight] = field(default_factory=list)

    def start(self, flight: _Flight, follows: Track | None = None) -> None:
        queue = self.queues[flight.start.axis]
        if follows is not None and self.queues[follows]:
            flight.after = self.queues[follows][-1]
        flight.begin_s = self.now_s
        queue.append(flight)
        if flight.left_s <= 0:
            self._land()

    def compute(self, work_s: float) -> None:
        if not any(self.queues.values()):  # most of the time
            self.now_s += work_s
            return
        while work_s > 0:
            rates = self._rates(computing=True)
            # What of a processor collectives take adds up, in the proportion of what each does at the moment.
            taken = sum((1 - 1 / f.slows_compute) * min(1.0, rate * f.slowed_by_compute) for f, rate in rates)
            pace = max(_LEAST_PACE, 1 - taken)
            passed_s = min(work_s / pace, self._next_landing_s(rates))
            # What ends now has nothing left, whatever was rounded.
            work_s = 0.0 if passed_s == work_s / pace else work_s - passed_s * pace
            self._pass(passed_s, rates)

    def wait_for(self, flight: _Flight | None) -> None:
        """Until it is done; None: until all are."""
        while (flight is None or flight.end_s == math.inf) and (rates := self._rates()):
            self._pass(self._next_landing_s(rates), rates)

    def _rates(self, *, computing: bool = False) -> list[tuple[_Flight, float]]:
        """Those under way, and how much of what they would do alone they do in a second."""
        first = [
            queue[0]
            for queue in self.queues.values()
            if queue and (queue[0].after is None or queue[0].after.end_s < math.inf)
        ]
        on_link = Counter(flight.link for flight in first)
        return [(f, 1 / (on_link[f.link] * (f.slowed_by_compute if computing else 1.0))) for f in first]

    def _next_landing_s(self, rates: list[tuple[_Flight, float]]) -> float:
        return min((flight.left_s / rate for flight, rate in rates), default=math.inf)

    def _pass(self, seconds: float, rates: list[tuple[_Flight, float]]) -> None:
        self.now_s += seconds
        for flight, rate in rates:
            # Equal times differ in their last digit.
            ends = flight.left_s / rate <= seconds * (1 + 1e-12)
            flight.left_s = 0.0 if ends else flight.left_s - seconds * rate
        self._land()

    def _land(self) -> None:
        for queue in self.queues.values():
            if queue and queue[0].left_s <= 0:
                flight = queue.popleft()
                flight.end_s = self.now_s
                self.landed.append(flight)
                if queue:
                    queue[0].begin_s = self.now_s
