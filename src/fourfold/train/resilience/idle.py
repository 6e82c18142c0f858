"""Ranks that the layout does not use: they wait until the run ends, or until the number of ranks changes.

Their hosts stay in the rendezvous, so that the next layout can use them.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from fourfold.train.recovery.stop import handling

POLL_S = 1.0
_ENDED = "ended"


def tell_idle(store: Any, is_done: bool) -> None:
    """Tell idle ranks that the run has ended; called on one rank of it."""
    store.set(_ENDED, "done" if is_done else "stopped")


def wait_idle(store: Any, rank: int, used: int) -> bool:
    """Wait until the run ends; True if it has done all its steps. A request to stop ends this rank alone."""
    print(f"rank {rank} is idle: the layout uses {used} ranks", file=sys.stderr, flush=True)
    stop = threading.Event()
    with handling(lambda signum, frame: stop.set()):
        while not stop.wait(POLL_S):
            if store.check([_ENDED]):
                return bool(store.get(_ENDED) == b"done")
    return False
