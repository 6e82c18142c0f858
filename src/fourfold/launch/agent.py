"""torchrun for batch systems: ranks save when the job is warned, and their exit code is passed on.

torchrun alone does neither (seen in torch 2.13.0). SIGUSR1 kills it and orphans its ranks. It forwards SIGTERM and SIGINT,
but kills ranks that have not ended after 30 seconds. It exits with 1 whatever the ranks' exit code is, so "saved, to be
continued" and an error of the run config look like a crash. `elastic` describes the problems of its restarts. All options are torchrun's.
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

from fourfold.processes import CONTINUE, REFUSED

if TYPE_CHECKING:
    from fourfold.launch.elastic import Agent

REPEAT_S = 2.0


def main(arguments: Sequence[str]) -> int:
    # Slurm sends the warning to every process of a step, or, where it tracks them by cgroups, to this one alone. Kubernetes
    # sends SIGTERM only to the first process of a pod.
    signal.signal(signal.SIGUSR1, _end)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGALRM, _warn_ranks)

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api as launcher
    from torch.distributed.run import parse_args, run

    from fourfold.launch.elastic import Agent, has_saved, run_and_rejoin
    from fourfold.mesh.rendezvous import FRESH_STORE
    from fourfold.train.recovery.stop import AGAIN_S

    interrupts_s: list[float] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        interrupts_s.append(time.monotonic())
        if interrupts_s[-1] - interrupts_s[0] > AGAIN_S:
            # A second interrupt means: do not wait for the save. torchrun ends the ranks.
            raise SignalException("interrupted again", signal.Signals(signum))
        _end(signum, frame)

    signal.signal(signal.SIGINT, interrupt)
    # Otherwise a host that joins later waits for the store of the first round; ranks have a store of their own.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[FRESH_STORE] = "1"
    # Less fragmentation of GPU memory. PyTorch reads it when a rank starts.
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # No option replaces torchrun's agent by another one (seen in torch 2.13.0).
    launcher.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    try:
        # Otherwise torchrun would replace our handlers by its own.
        options = parse_args(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
        run_and_rejoin(options, run)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if has_saved(failure.exitcode):
            return CONTINUE
        if failure.exitcode == REFUSED:  # the ranks have said why
            return REFUSED
        print(error, file=sys.stderr)
        return 1
    finally:
        # A signal must not kill this process while it exits.
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return 0


def _agent() -> Agent | None:
    """The running agent; None while torch is still being imported."""
    module = sys.modules.get("fourfold.launch.elastic")
    return module.Agent.current if module is not None and hasattr(module, "Agent") else None


def _end(signum: int, frame: FrameType | None) -> None:
    agent = _agent()
    if agent is None or not agent.ranks():  # no rendezvous yet, so there is nothing to save
        sys.exit(CONTINUE)
    agent.ask_to_end()
    # At once, then repeatedly: a rank that is still importing ignores it.
    signal.setitimer(signal.ITIMER_REAL, 1e-3, REPEAT_S)


def _warn_ranks(signum: int, frame: FrameType | None) -> None:
    agent = _agent()
    for rank in agent.ranks() if agent is not None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGUSR1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
