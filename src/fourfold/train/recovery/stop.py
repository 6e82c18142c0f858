"""A request to stop, such as a scheduler's warning before it takes the nodes away: heard by one rank, obeyed by all.

Whether some rank heard it travels on a process group of its own while the next step is computed, so nobody waits for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
AGAIN_S = (
    5.0  # torchrun passes on an interrupt that the terminal has sent to all; one that comes later is meant
)


class StopRequest:
    """All ranks make it, and ask it after each step."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        # Gloo also beside NCCL: the answer is read on the host, and must not wait for the device.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._heard_s: float | None = None
        self._asked: tuple[Tensor, Any] | None = None

    def request(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Stop after this step or the next one; who interrupts again will not wait for it."""
        now_s = time.monotonic()
        if signum == signal.SIGINT and self._heard_s is not None and now_s - self._heard_s > AGAIN_S:
            raise KeyboardInterrupt
        if self._heard_s is None:
            self._heard_s = now_s

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A signal is a request; only the main thread may listen to signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.request) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self) -> bool:
        """Had any rank heard a request when it was asked last? The same answer on all of them."""
        said = self._asked
        flag = torch.tensor([int(self._heard_s is not None)], dtype=torch.uint8)
        self._asked = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)
        if said is None:
            return False
        said[1].wait()
        return bool(said[0].item())

    def close(self) -> None:
        """Let the last question be answered, and end the process group."""
        if self._asked is not None:
            self._asked[1].wait()
        dist.destroy_process_group(self._group)
