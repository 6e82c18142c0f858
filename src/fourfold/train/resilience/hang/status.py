"""Where a rank stands: its step, what it is doing, and the collectives that it has started and not finished."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import InFlightCollective


@dataclass(frozen=True)
class InFlight:
    """A collective that is not finished."""

    axis: Axis
    number: int  # the how manyth of this rank on that axis: its peers count alike
    words: str
    age_s: float


@dataclass(frozen=True)
class Place:
    """What a rank says of itself."""

    rank: int
    host: str
    process: int
    step: int  # the one under way, counted from 1
    doing: str
    time: float
    counts: dict[str, int] = field(default_factory=dict)  # collectives begun, by axis
    in_flight: tuple[InFlight, ...] = ()  # the oldest first
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Place:
        flights = tuple(InFlight(**flight) for flight in values.pop("in_flight"))
        return Place(**values, in_flight=flights)


class Watch:
    """An observer of collectives. What it remembers is bounded by what is in flight."""

    def __init__(self, rank: int, now: Callable[[], tuple[int, str]], *, host_waits: bool) -> None:
        self._rank, self._now = rank, now
        # On CPUs a wait returns when the collective is done. On CUDA it returns at once: there the work itself is asked.
        self._host_waits = host_waits
        self._counts: Counter[str] = Counter()
        self._flights: deque[tuple[int, InFlightCollective]] = deque()
        self._lock = threading.Lock()
        self.progress_s = time.monotonic()
        self.error = ""  # of the first collective that failed

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None:
        with self._lock:
            self._counts[flight.axis] += 1
            if flight.work is not None:
                self._forget_finished()
                self._flights.append((self._counts[flight.axis], flight))
        self.progress_s = time.monotonic()

    def waited(self, flight: InFlightCollective) -> None:
        if self._host_waits:
            with self._lock:
                # Most are waited for in the order of their start.
                self._flights = deque(item for item in self._flights if item[1] is not flight)
        self.progress_s = time.monotonic()

    def failed(self, flight: InFlightCollective, error: Exception) -> None:
        # It stays in flight: that is where this rank stands.
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"

    def _forget_finished(self) -> None:
        while self._flights and self._is_finished(self._flights[0][1]):
            self._flights.popleft()

    def _is_finished(self, flight: InFlightCollective) -> bool:
        """What has failed is completed for the back end, but not for us."""
        work = flight.work
        if work is None or not work.is_completed():
            return work is None
        if self._host_waits:  # on CUDA the back end ends the process itself
            try:
                work.wait()  # at once; `Work.exception` would warn that it will go (torch 2.13.0)
            except RuntimeError:
                return False
        return True

    def oldest_s(self) -> float:
        """For how long the oldest collective has been in flight; 0 if there is none."""
        with self._lock:
            ages = [_age_s(flight) for _, flight in self._flights if not self._is_finished(flight)]
        return max(ages, default=0.0)

    def place(self, error: str = "") -> Place:
        step, doing = self._now()
        with self._lock:
            flights = [
                InFlight(flight.axis, number, in_words(flight), round(_age_s(flight), 3))
                for number, flight in self._flights
                if not self._is_finished(flight)
            ]
            counts = dict(self._counts)
        return Place(
            self._rank,
            socket.gethostname(),
            os.getpid(),
            step,
            doing,
            time.time(),
            counts,
            tuple(flights[:8]),
            error,
        )


def in_words(flight: InFlightCollective) -> str:
    """
    Example:
        >>> in_words(Flight("z", "all_gather", "weight", "model.layers.12.mlp.down_proj.weight", 8, 0))
        'z all-gather of model.layers.12.mlp.down_proj.weight'
        >>> in_words(Flight("x", "all_reduce", "clip", "", 4, 0))
        'x all-reduce for clip'
    """
    what = f"{flight.axis} {flight.kind.replace('_', '-')}"
    return f"{what} of {flight.module}" if flight.module else f"{what} for {flight.purpose}"


def _age_s(flight: InFlightCollective) -> float:
    return (time.time_ns() - flight.issued_ns) / 1e9
