"""What a rank does in a step, as its streams know it: the same for all ranks.

A stream is a list of items, done in order:

    ["work", seconds]              the device computes
    ["send", kind, group, bytes]   a collective; group is (stride, size): every size ranks that are stride apart
    ["record", event]              the event is over
    ["await", event]               not before the event is over
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
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

    def alone_s(self, seconds_of: Callable[[Item], float]) -> float:
        """How long it takes if every collective has its links for itself."""
        streams = {name: iter(items) for name, items in self.streams.items()}
        now_s = dict.fromkeys(streams, 0.0)
        over_s: dict[int, float] = {}
        waiting: dict[str, Item | None] = dict.fromkeys(streams)
        while streams:
            for name, items in list(streams.items()):
                while (item := waiting[name] or next(items, None)) is not None:
                    waiting[name] = None
                    if item[0] == "await" and item[1] not in over_s:
                        waiting[name] = item
                        break
                    if item[0] == "await":
                        now_s[name] = max(now_s[name], over_s[item[1]])
                    elif item[0] == "record":
                        over_s[item[1]] = now_s[name]
                    else:
                        now_s[name] += item[1] if item[0] == "work" else seconds_of(item)
                else:
                    del streams[name]
        return max(now_s.values(), default=0.0)

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
