"""How long the work of this rank stood still: by the clock on CPU, by events in the stream on CUDA.

On CPU a wait blocks the thread that computes. On CUDA it blocks the stream that computes, while the host goes on: two
events around the wait tell, once the device has passed them, how long the stream stood there. No GPU has run this.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Points in the order of this rank's work, and the seconds between them."""

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


def moment() -> tuple[float, float]:
    """Now, by the clock, and the seconds for which this thread had work until now: on a core, or waiting for one.

    Linux keeps the second for each thread; elsewhere this is the time on a core. If the thread lost its core between the
    readings, its wait for one has grown: then they are read again.
    """
    queue = getattr(_of_thread, "queue", None)
    # A process that was forked has its parent's.
    if queue is None or queue.thread != threading.get_native_id():
        queue = _of_thread.queue = _Queue()
    waited_ns = queue.waited_ns()
    while True:
        now_s, on_core_s = time.perf_counter(), time.thread_time()
        before_ns, waited_ns = waited_ns, queue.waited_ns()
        if waited_ns == before_ns:
            return now_s, on_core_s + waited_ns / 1e9


class _Queue:
    """How long this thread waited for a core. Its file stays open: to open it takes ten times as long as to read it."""

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def waited_ns(self) -> int:
        return int(os.pread(self._file, 80, 0).split()[1]) if self._file >= 0 else 0


_of_thread = threading.local()


def clock_of(device_type: str) -> Clock:
    return CudaClock() if device_type == "cuda" else HostClock()
