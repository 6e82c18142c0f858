"""Ranks that no layout has a place for: they wait beside the run until it ends, or until the number of ranks changes.

Their hosts stay in the meeting, so that the next layout can use them, and their agents need not know.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from fourfold.train.recovery.stop import SIGNALS

LOOK_S = 1.0
_ENDED = "ended"


def tell_idle(store: Any, is_done: bool) -> None:
    """On one rank of the run, at its end."""
    store.set(_ENDED, "done" if is_done else "stopped")


def wait_idle(store: Any, rank: int, used: int) -> bool:
    """Until the run ends: has it all its steps? A request to stop ends this rank alone, which nobody waits for."""
    print(
        f"rank {rank} is idle: the layout takes {used} ranks, and would not be whole with more",
        file=sys.stderr,
        flush=True,
    )
    asked = threading.Event()

    def end(signum: int, frame: FrameType | None) -> None:
        asked.set()

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        while not asked.wait(LOOK_S):
            if store.check([_ENDED]):
                return bool(store.get(_ENDED) == b"done")
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
