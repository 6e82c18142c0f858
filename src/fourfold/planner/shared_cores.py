"""How long a step takes where ranks share cores: all of them played through, not one for all.

With a device for each rank all ranks do the same at the same time, and one tells for all (`simulate.py`). Where several
share a core, a rank that waits for the network leaves its core to another, so groups that do not wait for each other drift
apart, and the waits of one hide behind the work of another. Here ranks take turns on the cores as the kernel lets them: the
first that is ready runs until it waits or its time slice is over. A collective begins when all of its group have started
it; those of one group and axis go one after the other, and those that pass the same node share its link.

Costs are as calibrated with all ranks at once: ``crowding`` ranks to a core, and all groups of a position sending together.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from fourfold.dry_run.events import Event, Operation, Start
from fourfold.mesh.axes import AXES, Axis
from fourfold.planner.simulate import Simulated

SLICE_S = 0.003  # of a core's time before the next one's turn: Linux's default on few cores


@dataclass(frozen=True)
class Flown:
    """What a collective costs: the part that nobody shares (latency), the part that is shared with others on its link."""

    latency_s: float
    moving_s: float
    slows_compute: float = 1.0
    moving_slowed: float = 1.0  # by computation on all cores
    latency_slowed: float = 1.0

    def slowed(self, *, in_latency: bool, busy: float) -> float:
        """How much longer it takes with this part of the cores computing."""
        return 1 + ((self.latency_slowed if in_latency else self.moving_slowed) - 1) * busy


@dataclass(frozen=True)
class Pool:
    """Ranks and the cores they share; nodes as they share links."""

    shape: tuple[int, int, int, int]
    cores: int
    devices_per_node: int
    in_flight: int = 1  # collectives of one group and axis at a time
    slice_s: float = SLICE_S

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)


def simulate_pool(
    events: Iterable[Event],
    pool: Pool,
    operation_s: Callable[[Operation], float],
    collective: Callable[[Start], Flown],
    *,
    start_s: Callable[[Start], float],
) -> Simulated:
    """Play the events through on every rank. Seconds of operations are those of a core that a rank has to itself."""
    world = _World(_compile(events, operation_s, collective, start_s), pool)
    world.run()
    ranks = pool.ranks
    return Simulated(
        step_s=world.now_s,
        compute_s=sum(world.now_s - sum(rank.blocked_s.values()) for rank in world.ranks) / ranks,
        compute_s_by_phase={},
        link_s={
            axis: sum(s.flown.latency_s + s.flown.moving_s for s in world.program.starts if s.axis == axis)
            for axis in {s.axis for s in world.program.starts}
        },
        exposed_s={
            axis: sum(rank.blocked_s[axis] for rank in world.ranks) / ranks
            for axis in {s.axis for s in world.program.starts}
        },
        spans=(),
    )


# -- the program that all ranks run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Begin:
    number: int
    axis: Axis
    flown: Flown


@dataclass(frozen=True)
class _Program:
    """Work in seconds (a float), a collective to start, or the number of one to wait for."""

    steps: list[float | _Begin | int]
    starts: list[_Begin]


def _compile(
    events: Iterable[Event],
    operation_s: Callable[[Operation], float],
    collective: Callable[[Start], Flown],
    start_s: Callable[[Start], float],
) -> _Program:
    steps: list[float | _Begin | int] = []
    starts: list[_Begin] = []
    under_way: dict[tuple[str, ...], deque[int]] = defaultdict(deque)
    work_s = 0.0
    for event in events:
        if isinstance(event, Operation):
            work_s += operation_s(event)
            continue
        words = (event.axis, event.kind, event.purpose, event.module)
        if isinstance(event, Start):
            work_s += start_s(event)
            begin = _Begin(len(starts), event.axis, collective(event))
            under_way[words].append(begin.number)
            starts.append(begin)
            steps += [work_s, begin]
            work_s = 0.0
        elif under_way[words]:
            steps += [work_s, under_way[words].popleft()]
            work_s = 0.0
    return _Program([*steps, work_s], starts)


# -- ranks, cores, links --------------------------------------------------------------------------------------------------


@dataclass
class _Rank:
    number: int
    at: int = 0  # in the program
    work_s: float = 0.0  # left of what it is at
    turn_s: float = 0.0  # left of its time slice
    waits_for: _Flight | None = None
    since_s: float = 0.0
    blocked_s: dict[Axis, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(eq=False)
class _Flight:
    """One group's collective."""

    begin: _Begin
    group: int
    to_come: int  # ranks that have not started it
    nodes: tuple[int, ...]
    share: float  # of a node's link, with all groups of this position at once
    part: float  # of all groups of this position
    latency_s: float
    moving_s: float
    landed: bool = False
    waiting: list[_Rank] = field(default_factory=list)


class _World:
    def __init__(self, program: _Program, pool: Pool) -> None:
        self.program, self.pool = program, pool
        self.now_s = 0.0
        self.ranks = [_Rank(r) for r in range(pool.ranks)]
        self._ready: deque[_Rank] = deque()
        self._running: list[_Rank] = []
        self._queues: dict[tuple[Axis, int], deque[_Flight]] = defaultdict(deque)
        self._flights: dict[tuple[int, int], _Flight] = {}

    def run(self) -> None:
        for rank in self.ranks:
            self._go_on(rank)
        while True:
            while self._ready and len(self._running) < self.pool.cores:
                rank = self._ready.popleft()
                rank.turn_s = self.pool.slice_s
                self._running.append(rank)
            busy = len(self._running) / self.pool.cores
            flying = [
                (f, rate / f.begin.flown.slowed(in_latency=f.latency_s > 0, busy=busy), rate)
                for f, rate in self._rates()
            ]
            if not self._running and not flying:
                return
            taken = sum(
                (1 - 1 / f.begin.flown.slows_compute) * f.part * min(1.0, rate) for f, _, rate in flying
            )
            pace = max(0.05, 1 - taken)
            passed_s = min(
                [min(r.work_s / pace, r.turn_s) for r in self._running]
                + [(f.latency_s or f.moving_s) / rate for f, rate, _ in flying]
            )
            self.now_s += passed_s
            self._land([(f, rate) for f, rate, _ in flying], passed_s)
            self._work(pace, passed_s)

    def _rates(self) -> list[tuple[_Flight, float]]:
        """Those under way, and the seconds of each that pass in one, if there were no computation."""
        most = self.pool.in_flight
        first = [f for queue in self._queues.values() for f in islice(queue, most) if not f.to_come]
        load: dict[tuple[int, bool], float] = defaultdict(float)
        for f in first:
            for node in f.nodes:
                load[node, len(f.nodes) > 1] += f.share
        rates = []
        for f in first:
            rate = 1.0
            if not f.latency_s:
                rate = 1 / max(load[node, len(f.nodes) > 1] for node in f.nodes)
            rates.append((f, rate))
        return rates

    def _land(self, flying: list[tuple[_Flight, float]], passed_s: float) -> None:
        for flight, rate in flying:
            left_s = (flight.latency_s or flight.moving_s) - passed_s * rate
            left_s = left_s if left_s > 1e-12 else 0.0
            if flight.latency_s:
                flight.latency_s = left_s
            else:
                flight.moving_s = left_s
            if flight.latency_s or flight.moving_s:
                continue
            flight.landed = True
            self._queues[flight.begin.axis, flight.group].remove(flight)
            for rank in flight.waiting:
                rank.blocked_s[flight.begin.axis] += self.now_s - rank.since_s
                rank.waits_for = None
                self._go_on(rank)

    def _work(self, pace: float, passed_s: float) -> None:
        for rank in list(self._running):
            rank.work_s -= passed_s * pace
            rank.turn_s -= passed_s
            if rank.work_s <= 1e-12:
                self._running.remove(rank)
                self._go_on(rank, at_work=True)
            elif rank.turn_s <= 1e-12:
                self._running.remove(rank)
                self._ready.append(rank)

    def _go_on(self, rank: _Rank, *, at_work: bool = False) -> None:
        """To the next work of a rank, past what needs no time, or to what it has to wait for.

        One that was ``at_work`` keeps its core for the rest of its slice.
        """
        steps = self.program.steps
        while rank.at < len(steps):
            step = steps[rank.at]
            rank.at += 1
            if isinstance(step, float):
                if step > 0:
                    rank.work_s = step
                    if at_work and rank.turn_s > 1e-12:
                        self._running.append(rank)
                    else:
                        self._ready.append(rank)
                    return
            elif isinstance(step, _Begin):
                self._start(rank, step)
            else:
                flight = self._flights[step, self._group(rank, self.program.starts[step].axis)]
                if not flight.landed:
                    rank.waits_for, rank.since_s = flight, self.now_s
                    flight.waiting.append(rank)
                    return

    def _start(self, rank: _Rank, begin: _Begin) -> None:
        group = self._group(rank, begin.axis)
        flight = self._flights.get((begin.number, group))
        if flight is None:
            size, inner = self._size(begin.axis), self._inner(begin.axis)
            first = group // inner * inner * size + group % inner
            nodes = tuple(sorted({(first + i * inner) // self.pool.devices_per_node for i in range(size)}))
            # Groups of this position that pass one node: one for each inner rank in it, where they leave it.
            per_node = min(self.pool.devices_per_node, self.pool.ranks)
            beside = min(inner, per_node) if len(nodes) > 1 else max(1.0, per_node / size)
            flown = begin.flown
            part = size / self.pool.ranks
            flight = _Flight(begin, group, size, nodes, 1 / beside, part, flown.latency_s, flown.moving_s)
            self._flights[begin.number, group] = flight
            self._queues[begin.axis, group].append(flight)
        flight.to_come -= 1
        if not flight.to_come and not flight.latency_s and not flight.moving_s:
            flight.latency_s = 1e-9

    def _size(self, axis: Axis) -> int:
        return self.pool.shape[AXES.index(axis)]

    def _inner(self, axis: Axis) -> int:
        return math.prod(self.pool.shape[AXES.index(axis) + 1 :])

    def _group(self, rank: _Rank, axis: Axis) -> int:
        """Which of the axis' groups it is in."""
        size, inner = self._size(axis), self._inner(axis)
        return rank.number // (size * inner) * inner + rank.number % inner
