"""Ranks that start at once: forked from a process that has imported everything, and waits.

A rank that dies costs its run the import of torch and transformers on every rank, which is most of a restart. The server
has imported them before anything fails, has no threads and has not touched a device, so a fork of it is as good as a new
process. It is Python's own fork server, which starts anew if it is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any

from fourfold.launch.block_sigterm import IN_SERVER

# What a run imports before its first step. Models' own files are small beside these.
PRELOAD = (
    "fourfold.launch.block_sigterm",
    "fourfold.train.run",
    "fourfold.cli.main",
    "fourfold.planner.plan",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
)
SERVER_IS_GONE = 255  # what a rank seems to have ended with when nobody can say
_context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Begin to import; returns at once."""
    wanted = {
        "OMP_NUM_THREADS": "1",  # threads do not survive a fork; a rank sets its own number
        # Python's fork server ignores the sys.path it is given (3.11), and then skips what it cannot import.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # Asking the CUDA runtime for devices would spoil it for all forks. NVML does not.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        IN_SERVER: "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        _context.set_forkserver_preload(list(PRELOAD))
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_rank(
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: Any = None,
) -> Any:
    """In place of torchrun's `get_subprocess_handler`: `python -m module` is forked, all else is a new process."""
    if entrypoint == sys.executable and args[:2] == ("-u", "-m") and numa_options is None:
        start_server()  # if it is gone, another
        return WarmRank([str(arg) for arg in args[2:]], {**os.environ, **env}, stdout, stderr, local_rank_id)
    # No public name (seen in torch 2.13.0).
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)


class WarmRank:
    """A forked rank, with as much of `SubprocessHandler` and of `subprocess.Popen` as torchrun asks for."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], stdout: str, stderr: str, local_rank_id: int
    ) -> None:
        self.local_rank_id = local_rank_id
        self._process = _context.Process(target=_rank, args=(list(command), dict(env), stdout, stderr))
        self._process.start()
        self.proc = self

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        code = self._process.exitcode
        if code == SERVER_IS_GONE:
            # The rank may live on, and two generations must not write one folder of checkpoints.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """To the rank and all that it started."""
        try:
            os.killpg(self.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:  # it is no leader yet, or it has ended
            if self.poll() is None:
                os.kill(self.pid, death_sig or signal.SIGTERM)


def _rank(command: list[str], env: dict[str, str], stdout: str, stderr: str) -> None:
    """The fork: as if it were `python -u -m command`."""
    os.setsid()
    _end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    gc.freeze()  # leaves the pages shared with the server untouched
    os.environ.clear()
    os.environ.update(env)
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, stream.fileno())
            os.close(file)
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if "OMP_NUM_THREADS" in env:
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = list(command)
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:
        # Python leaves them out in forks; trackers send their last figures there.
        atexit._run_exitfuncs()


def _end_with_parent() -> None:
    """The server ends with the agent. Ranks without one would hold their devices for ever: they save and end."""
    pr_set_pdeathsig = 1  # <linux/prctl.h>
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
