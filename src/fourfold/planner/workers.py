"""Dry runs in parallel, each in its own process: a process has one fake world at a time, and none if it is a rank.

`multiprocessing` would run the user's script again in every process; these run only this module.
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
from typing import Any

from fourfold.planner.dry_run_estimate import DryRunEstimate, Job, estimate_in_process
from fourfold.planner.inputs.layout import Layout

_AT_MOST = 8  # processes; each takes half a gigabyte


def estimate_by_dry_run(job: Job, layout: Layout) -> DryRunEstimate:
    """The dry run of a layout; in another process if this one is already a rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return estimate_in_process(job, layout)
    with Worker() as worker:
        done = worker.estimate(job, layout)
    if isinstance(done, ValueError):
        raise done
    return done


def estimate_all(job: Job, layouts: Sequence[Layout]) -> Iterator[DryRunEstimate | ValueError]:
    """The dry run of each layout in order, or the error that it raised."""
    count = max(1, min(len(layouts), len(os.sched_getaffinity(0)), _AT_MOST))
    own = threading.local()
    with ExitStack() as started, ThreadPoolExecutor(count) as threads:

        def estimate(layout: Layout) -> DryRunEstimate | ValueError:
            if not hasattr(own, "worker"):
                own.worker = started.enter_context(Worker())
            worker: Worker = own.worker
            return worker.estimate(job, layout)

        yield from threads.map(estimate, layouts)


class Worker:
    """A process that runs one dry run after another."""

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fourfold.planner.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked, self._answers = self._process.stdin, self._process.stdout
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.close()
        self._process.wait()
        self._answers.close()

    def estimate(self, job: Job, layout: Layout) -> DryRunEstimate | ValueError:
        """Run `estimate_in_process` in the worker."""
        try:
            pickle.dump((job, layout), self._asked)
            self._asked.flush()
            result: DryRunEstimate | ValueError | str = pickle.load(self._answers)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"the process of the dry run of {layout} ended; see what it printed") from None
        return ValueError(result) if isinstance(result, str) else result


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    while True:
        try:
            given = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result: Any = estimate_in_process(*given)
        except ValueError as error:
            result = str(error)
        pickle.dump(result, answers)
        answers.flush()


if __name__ == "__main__":
    main()
