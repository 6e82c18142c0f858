"""Time on this rank: the host's clock on CPU, events in the current stream on CUDA.

On CPU a wait blocks the thread that computes. On CUDA it blocks the stream that computes, while the host goes on: two
events around the wait tell how long the stream was blocked, once the device has passed them.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks in the order of this rank's work, and the seconds between them."""

    # Is the time between two marks known at once? If not, reading it waits for the device.
    immediate: bool

    def mark(self) -> Any: ...

    def elapsed_s(self, start: Any, end: Any) -> float: ...


class HostClock:
    immediate = True

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Events in the current stream, the one that computes."""

    immediate = False

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device_type: str) -> Clock:
    return CudaClock() if device_type == "cuda" else HostClock()
