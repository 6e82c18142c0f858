"""Dry runs beside each other, each in a process of its own: a process has one fake world at a time, and none if it is a rank.

`multiprocessing` would run the user's script again in every process; these run this module alone.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.planner.rehearsal import Rehearsal

_AT_MOST = 8  # processes; each takes half a gigabyte


def rehearse_all(given: Sequence[tuple[Any, ...]]) -> Iterator[Rehearsal | ValueError]:
    """The rehearsal of each, in their order, or what the dry run refuses it with."""
    count = max(1, min(len(given), len(os.sched_getaffinity(0)), _AT_MOST))
    own = threading.local()
    with ExitStack() as started, ThreadPoolExecutor(count) as threads:

        def rehearse(one: tuple[Any, ...]) -> Rehearsal | ValueError:
            if not hasattr(own, "worker"):
                own.worker = started.enter_context(Worker())
            worker: Worker = own.worker
            return worker.rehearse(one)

        yield from threads.map(rehearse, given)


class Worker:
    """A process that does one dry run after the other."""

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fourfold.planner.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def rehearse(self, given: tuple[Any, ...]) -> Rehearsal | ValueError:
        """The arguments of `rehearsal.rehearse_here`, run there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(given, self._process.stdin)
            self._process.stdin.flush()
            result: Rehearsal | ValueError | str = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(
                f"the process of the dry run of {given[1]} ended; see what it printed"
            ) from None
        return ValueError(result) if isinstance(result, str) else result


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not get between
    from fourfold.planner.rehearsal import rehearse_here

    while True:
        try:
            given = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result: Any = rehearse_here(*given)
        except ValueError as refusal:
            result = str(refusal)
        pickle.dump(result, answers)
        answers.flush()


if __name__ == "__main__":
    main()
