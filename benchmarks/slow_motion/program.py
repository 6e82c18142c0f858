"""What a rank does in a step, as its streams know it: the same for all ranks.

A stream is a list of items, done in order:

    ["work", seconds]              the device computes
    ["send", kind, group, bytes]   a collective; group is (stride, size): every size ranks that are stride apart
    ["record", event]              the event is over
    ["await", event]               not before the event is over
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

Item = list[Any]
COMPUTE = "compute"


@dataclass
class Program:
    streams: dict[str, list[Item]] = field(default_factory=lambda: defaultdict(list))
    # An event that is over when the device comes to backward.
    backward: int | None = None
    _events: itertools.count[int] = field(default_factory=itertools.count)

    def work(self, stream: str, seconds: float) -> None:
        items = self.streams[stream]
        if items and items[-1][0] == "work":
            items[-1][1] += seconds
        else:
            items.append(["work", seconds])

    def record(self, stream: str) -> int:
        items = self.streams[stream]
        if items and items[-1][0] == "record":  # nothing since
            return int(items[-1][1])
        event = next(self._events)
        items.append(["record", event])
        return event

    def wait(self, stream: str, event: int) -> None:
        self.streams[stream].append(["await", event])

    def send(self, stream: str, kind: str, group: tuple[int, int], size: float) -> int:
        """A collective that begins when ``stream`` comes to it, on its group's own stream; the event of its end."""
        own = f"group {group[0]} {group[1]}"
        self.wait(own, self.record(stream))
        self.streams[own].append(["send", kind, list(group), size])
        return self.record(own)

    # -- totals -------------------------------------------------------------------------------------------------------

    def work_s(self) -> float:
        return sum(item[1] for items in self.streams.values() for item in items if item[0] == "work")

    def sends(self) -> list[Item]:
        return [item for items in self.streams.values() for item in items if item[0] == "send"]

    def without(self, kind: str) -> Program:
        """The same without its work, or without its collectives."""
        kept = {name: [item for item in items if item[0] != kind] for name, items in self.streams.items()}
        return Program(kept, self.backward, self._events)

    def estimated_s(
        self, seconds_of: Callable[[Item], float], link_of: Callable[[Item], Hashable] = id
    ) -> float:
        """How long it takes if a collective alone takes ``seconds_of``, and those under way on one link share it equally."""
        streams = {name: iter(items) for name, items in self.streams.items()}
        held: dict[str, Item] = {}  # what a stream waits for
        doing: dict[str, tuple[Item, float]] = {}  # and what is left of it, alone
        over: set[int] = set()
        now_s = 0.0

        def go_on(name: str) -> bool:
            """To the next item that takes time, or that has to wait; whether an event is over now."""
            has_recorded = False
            while name in streams and name not in doing:
                item = held.pop(name, None) or next(streams[name], None)
                if item is None:
                    del streams[name]
                elif item[0] == "await" and item[1] not in over:
                    held[name] = item
                    break
                elif item[0] == "record":
                    over.add(item[1])
                    has_recorded = True
                elif item[0] in ("work", "send"):
                    doing[name] = item, item[1] if item[0] == "work" else seconds_of(item)
            return has_recorded

        while True:
            while any([go_on(name) for name in tuple(streams)]):
                pass
            if not doing:
                return now_s
            on_link = Counter(link_of(item) for item, _ in doing.values() if item[0] == "send")
            slower = {
                name: on_link.get(link_of(i), 1) if i[0] == "send" else 1 for name, (i, _) in doing.items()
            }
            passed_s = min(left_s * slower[name] for name, (_, left_s) in doing.items())
            now_s += passed_s
            for name, (item, left_s) in tuple(doing.items()):
                # Equal times differ in their last digit.
                if left_s * slower[name] <= passed_s * (1 + 1e-12):
                    del doing[name]
                else:
                    doing[name] = item, left_s - passed_s / slower[name]

    def by_phase(self, seconds_of: Callable[[Item], float]) -> list[tuple[float, float]]:
        """(computation, communication) of forward and of backward, of a program in which everything waits for everything."""
        assert self.backward is not None
        phases = [[0.0, 0.0], [0.0, 0.0]]
        for items in self.streams.values():
            phase = 0
            for item in items:
                if item[0] in ("record", "await") and item[1] >= self.backward:
                    phase = 1
                elif item[0] == "work":
                    phases[phase][0] += item[1]
                elif item[0] == "send":
                    phases[phase][1] += seconds_of(item)
        return [(computation, communication) for computation, communication in phases]
