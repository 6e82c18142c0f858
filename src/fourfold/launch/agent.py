"""torchrun with an ending that a batch system can read: a warning lets the ranks save, and their status comes out.

torchrun alone does neither (seen in torch 2.13.0). It dies of SIGUSR1, and leaves its ranks behind. On SIGTERM it passes the
signal on, but kills what has not ended after 30 seconds. And whatever the ranks end with, it ends with 1, so that
"saved, to be continued" looks like a crash. All options are torchrun's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fourfold.launch import CONTINUE

REPEAT_S = 2.0


def main(arguments: Sequence[str]) -> int:
    # Slurm sends the warning to every process of a step. What is ignored here is ignored in all that start from here
    # until they ask for it: a rank that still imports, or a helper of one, does not die of a warning.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Kubernetes sends SIGTERM to the first process of a pod alone.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGALRM, _warn_ranks)

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        # torchrun would put its own handler of SIGTERM in place of ours.
        run(parse_args(["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", *arguments]))
    except ChildFailedError as error:
        # The first to end says why; it is for its sake that the others were stopped.
        _, failure = error.get_first_failure()
        # A rank dies of the warning only on its way out, when Python has given up its handlers: it had saved by then.
        if failure.exitcode in (CONTINUE, -signal.SIGUSR1):
            return CONTINUE
        print(error, file=sys.stderr)
        return 1
    finally:
        # Nor is this process to die of a signal on its way out.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


def _end(signum: int, frame: FrameType | None) -> None:
    if not _children():  # they have not met yet, so there is nothing to save
        sys.exit(CONTINUE)
    # At once, and again and again: a rank that still imports does not hear it.
    signal.setitimer(signal.ITIMER_REAL, 1e-3, REPEAT_S)


def _warn_ranks(signum: int, frame: FrameType | None) -> None:
    for rank in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGUSR1)


def _children() -> list[int]:
    """The processes that this one started."""
    return [
        int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
