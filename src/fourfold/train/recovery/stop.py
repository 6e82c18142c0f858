"""A request to stop, such as a scheduler's warning before preemption: received by one rank, followed by all.

Ranks agree on a process group of its own while the next step is computed, so no step waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

from fourfold.mesh.agreements import any_rank, host_group

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# torchrun forwards an interrupt that the terminal has sent to all processes; only a later one is a second request.
AGAIN_S = 5.0


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals that request a stop; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class StopRequest:
    """Construct it on all ranks, and call `agreed` after each step."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self._group = host_group(timeout_s)
        self._is_first = dist.get_rank() == 0
        self._requested_s: float | None = None
        self._pending: Callable[[], bool] | None = None

    def request(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Stop after this step or the next one; a second interrupt stops at once."""
        now_s = time.monotonic()
        if signum == signal.SIGINT and self._requested_s is not None and now_s - self._requested_s > AGAIN_S:
            raise KeyboardInterrupt
        if self._requested_s is None:
            self._requested_s = now_s
            if self._is_first:  # not by `print`, which the signal may have interrupted
                os.write(2, b"asked to stop: the run saves after the current step and the next one\n")

    def agreed(self) -> bool:
        """Had any rank received a request at the previous call? The answer is the same on all ranks."""
        previous, self._pending = self._pending, any_rank(self._requested_s is not None, self._group)
        return previous is not None and previous()

    def close(self) -> None:
        """Wait for the last agreement, and destroy the process group."""
        if self._pending is not None:
            self._pending()
        dist.destroy_process_group(self._group)
