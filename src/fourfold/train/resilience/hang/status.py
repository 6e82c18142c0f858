"""The status of a rank: its step, what it is doing, and the collectives that it has started and not finished."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import TypeAdapter
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import InFlightCollective, Observer


@dataclass(frozen=True)
class InFlight:
    """A collective that is not finished."""

    axis: Axis
    number: int  # of this rank's collectives on that axis, counted from 1; its peers count alike
    words: str
    age_s: float


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports of itself."""

    rank: int
    host: str
    process: int
    step: int  # the current one, counted from 1
    doing: str
    counts: dict[str, int] = field(default_factory=dict)  # collectives started, by axis
    in_flight: tuple[InFlight, ...] = ()  # oldest first
    error: str = ""
    beat: int = 0  # number of the heartbeat that carries it, in one order for all ranks
    age_s: float = 0.0  # since it was sent, at least, by the clock of the rank that reads it


JSON = TypeAdapter(RankStatus)


class CollectiveTracker(Observer):
    """Observes collectives, and keeps those that are in flight. ``now`` gives the current step and activity."""

    def __init__(self, rank: int, now: Callable[[], tuple[int, str]], *, host_waits: bool) -> None:
        self._rank, self._now = rank, now
        # On CPU a wait returns when the collective is done. On CUDA it returns at once, so the work itself is queried.
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
                while self._flights and self._is_finished(self._flights[0][1]):
                    self._flights.popleft()
                self._flights.append((self._counts[flight.axis], flight))
        self.progress_s = time.monotonic()

    def waited(self, flight: InFlightCollective) -> None:
        if self._host_waits:
            with self._lock:
                self._flights = deque(item for item in self._flights if item[1] is not flight)
        self.progress_s = time.monotonic()

    def failed(self, flight: InFlightCollective, error: Exception) -> None:
        # It stays in flight: the status shows where this rank failed.
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"

    def _is_finished(self, flight: InFlightCollective) -> bool:
        """A failed collective is completed for the backend, but not here."""
        work = flight.work
        if work is None or not work.is_completed():
            return work is None
        if self._host_waits:  # on CUDA the backend ends the process itself
            try:
                work.wait()  # returns at once; `Work.exception` is deprecated (torch 2.13.0)
            except RuntimeError:
                return False
        return True

    def oldest_s(self) -> float:
        """How long the oldest collective has been in flight; 0 if there is none."""
        with self._lock:
            ages = [_age_s(flight) for _, flight in self._flights if not self._is_finished(flight)]
        return max(ages, default=0.0)

    def status(self, error: str = "", beat: int = 0) -> RankStatus:
        step, doing = self._now()
        with self._lock:
            flights = [
                InFlight(flight.axis, number, describe(flight), round(_age_s(flight), 3))
                for number, flight in self._flights
                if not self._is_finished(flight)
            ]
            counts = dict(self._counts)
        host, process = socket.gethostname(), os.getpid()
        return RankStatus(self._rank, host, process, step, doing, counts, tuple(flights[:8]), error, beat)


def describe(flight: InFlightCollective) -> str:
    """
    Example:
        >>> describe(InFlightCollective("z", "all_gather", "weight", "model.layers.12.mlp.down_proj.weight", 8, 0))
        'z all-gather of model.layers.12.mlp.down_proj.weight'
        >>> describe(InFlightCollective("x", "all_reduce", "clip", "", 4, 0))
        'x all-reduce for clip'
    """
    what = f"{flight.axis} {flight.kind.replace('_', '-')}"
    return f"{what} of {flight.module}" if flight.module else f"{what} for {flight.purpose}"


def _age_s(flight: InFlightCollective) -> float:
    return (time.time_ns() - flight.issued_ns) / 1e9
