"""Dry runs in parallel, each in its own process: a process has one fake world at a time, and none if it is a rank.

`multiprocessing` would run the user's script again in every process; these run only this module.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from fourfold.planner.cost.step import Estimate
from fourfold.planner.dry_run_estimate import DryRunEstimate, Job, as_estimate, estimate_in_process
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload

_AT_MOST = 8  # processes; each takes half a gigabyte
_WORTH_PROCESSES = 4  # layouts; a process needs seconds to import torch

R = TypeVar("R")


def estimate_by_dry_run(job: Job, layout: Layout) -> DryRunEstimate:
    """The dry run of a layout."""
    (done,) = for_all(partial(estimate_in_process, job), [layout])
    if isinstance(done, ValueError):
        raise done
    return done


def simulate_layout(job: Job, workload: Workload | None, cluster: Cluster, layout: Layout) -> Estimate:
    """The dry run of a layout, simulated on the cluster."""
    return as_estimate(estimate_in_process(job, layout), job, workload, cluster)


def for_all(task: Callable[[Layout], R], layouts: Sequence[Layout]) -> Iterator[R | ValueError]:
    """What ``task`` says of each layout in order, or its error; in other processes if there are many or this one is a rank."""
    if not layouts:
        return
    dist = sys.modules.get("torch.distributed")  # to import it takes seconds
    is_rank = dist is not None and dist.is_available() and dist.is_initialized()
    if not is_rank and (len(layouts) < _WORTH_PROCESSES or _needs_this_process(task)):
        yield from (_tried(task, layout) for layout in layouts)
        return
    count = max(1, min(len(layouts), len(os.sched_getaffinity(0)), _AT_MOST))
    own = threading.local()
    with ExitStack() as started, ThreadPoolExecutor(count) as threads:

        def ask(layout: Layout) -> R | ValueError:
            if not hasattr(own, "worker"):
                own.worker = started.enter_context(_worker())
            done: R | ValueError = own.worker(task, layout)
            return done

        yield from threads.map(ask, layouts)


def _needs_this_process(task: object) -> bool:
    """Is a class of the user's script needed, which another process does not have?"""
    try:
        return b"__main__" in pickle.dumps(task)
    except (pickle.PicklingError, AttributeError):  # of a class inside a function
        return True


def _tried(task: Callable[[Layout], R], layout: Layout) -> R | ValueError:
    try:
        return task(layout)
    except ValueError as error:  # without what cannot be sent to another process
        return ValueError(str(error)).with_traceback(error.__traceback__)


@contextmanager
def _worker() -> Iterator[Callable[[Callable[[Layout], R], Layout], R | ValueError]]:
    """`_tried` in a process that runs one dry run after another."""
    paths = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-m", "fourfold.planner.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None
        assert answers is not None

        def ask(task: Callable[[Layout], R], layout: Layout) -> R | ValueError:
            try:
                pickle.dump((task, layout), asked)
                asked.flush()
                result: R | ValueError = pickle.load(answers)
            except (EOFError, BrokenPipeError):
                raise RuntimeError(
                    f"the process of the dry run of {layout} ended; see what it printed"
                ) from None
            return result

        yield ask


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    while True:
        try:
            given = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_tried(*given), answers)
        answers.flush()


if __name__ == "__main__":
    main()
