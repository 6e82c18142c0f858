"""torchrun with an ending that a batch system can read: a warning lets the ranks save, and their status comes out.

torchrun alone does neither (seen in torch 2.13.0). It dies of SIGUSR1, and leaves its ranks behind. On SIGTERM and SIGINT
it passes the signal on, but kills what has not ended after 30 seconds. And whatever the ranks end with, it ends with 1,
so that "saved, to be continued" looks like a crash. What is the matter with its restarts is in `elastic`, and `warm` makes
them short. All options are torchrun's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from fourfold.processes import CONTINUE

if TYPE_CHECKING:
    from fourfold.launch.elastic import Agent

REPEAT_S = 2.0


def main(arguments: Sequence[str]) -> int:
    # Slurm sends the warning to every process of a step. What is ignored here is ignored in all that start from here
    # until they ask for it: a rank that still imports, or a helper of one, does not die of a warning.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Kubernetes sends SIGTERM to the first process of a pod alone.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGALRM, _warn_ranks)

    from fourfold.launch import forkserver as warm

    if "-m" in arguments:  # what ranks import is imported meanwhile
        warm.start_server()

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from fourfold.launch.elastic import has_saved, run_and_rejoin
    from fourfold.train.recovery.stop import AGAIN_S

    interrupts_s: list[float] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        interrupts_s.append(time.monotonic())
        if interrupts_s[-1] - interrupts_s[0] > AGAIN_S:
            # Who interrupts again will not wait for a save: torchrun ends the ranks.
            raise SignalException("interrupted again", signal.Signals(signum))
        _end(signum, frame)

    signal.signal(signal.SIGINT, interrupt)
    _mend_torchrun()
    try:
        # torchrun would put its own handlers in place of ours.
        options = parse_args(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
        run_and_rejoin(options, run)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if has_saved(failure.exitcode):
            return CONTINUE
        print(error, file=sys.stderr)
        return 1
    finally:
        # Nor is this process to die of a signal on its way out.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return 0


def _mend_torchrun() -> None:
    """Its own parts, in place of those that it would take; there are no options for them (seen in torch 2.13.0)."""
    from torch.distributed.elastic.multiprocessing import api as processes
    from torch.distributed.launcher import api as launcher

    from fourfold.launch import elastic
    from fourfold.launch import forkserver as warm
    from fourfold.mesh.rendezvous import FRESH_STORE

    # Otherwise a host that comes later waits for the store of the first round; the ranks have one of their own.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[FRESH_STORE] = "1"
    launcher.LocalElasticAgent = elastic.Agent  # type: ignore[attr-defined]
    processes.get_subprocess_handler = warm.start_rank  # type: ignore[attr-defined]


def _agent() -> Agent | None:
    """Once it is there; torch may still be on its way."""
    module = sys.modules.get("fourfold.launch.elastic")
    return module.Agent.current if module is not None and hasattr(module, "Agent") else None


def _end(signum: int, frame: FrameType | None) -> None:
    agent = _agent()
    if agent is None or not agent.ranks():  # they have not met yet, so there is nothing to save
        sys.exit(CONTINUE)
    agent.ask_to_end()
    # At once, and again and again: a rank that still imports does not hear it.
    signal.setitimer(signal.ITIMER_REAL, 1e-3, REPEAT_S)


def _warn_ranks(signum: int, frame: FrameType | None) -> None:
    agent = _agent()
    for rank in agent.ranks() if agent is not None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGUSR1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
