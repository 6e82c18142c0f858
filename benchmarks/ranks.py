"""Run a plain function on N Gloo ranks of this machine.

Ranks are forked from a server that has already imported torch and transformers, so sixteen of them start in about
a second, and they stay alive between runs. There is one team of ranks for each world size in use: a process that
lives through two world sizes would meet stale meshes in DTensor's caches, which compare meshes by shape, not by group.
"""

import atexit
import faulthandler
import gc
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, get_context, get_start_method, parent_process, set_start_method
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "benchmarks.ranks",
)
HOST = "127.0.0.1"
HANG_S = 450.0  # enough on a busy machine, and less than a test may take: stacks are shown before a test is stopped
GRACE_S = 2.0  # for the other ranks to report, once one has failed
MAX_GROUPS = 64  # each Gloo group keeps threads and sockets until its process ends

_context = get_context("forkserver")


class RankError(RuntimeError):
    """A run failed on some rank; `rank` is the one that failed first, or None if no rank failed but time ran out."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class RankPool:
    """Ranks of this machine, kept ready to run functions.

    >>> with RankPool(max_ranks=16) as pool:                      # doctest: +SKIP
    ...     losses = pool.run(train_a_little, 8, steps=3)         # fn(steps=3) on 8 ranks; one result per rank

    `fn` must be importable: a function at the top level of a module or of a script. Inside it `torch.distributed` is
    initialised on Gloo and the environment is as under torchrun. State that `fn` leaves in modules stays for later
    runs of the same world size. `preload` names more modules to import once, in the server, before ranks are forked;
    it has effect for the first pool of a process. `quiet` silences the standard output of all ranks but rank 0.
    """

    def __init__(self, max_ranks: int = 16, *, quiet: bool = False, preload: Iterable[str] = ()) -> None:
        self.max_ranks = max_ranks
        self.quiet = quiet
        self._preload = list(dict.fromkeys([*preload, *PRELOAD]))
        self._teams: dict[int, _Team] = {}  # by world size, least recently used first
        # Registered after multiprocessing's own exit handler, hence run before it: that one waits for live children.
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., T], world_size: int, /, *args: Any, timeout_s: float = HANG_S, **kwargs: Any
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on each of `world_size` ranks and return their results in rank order.

        Raises RankError with the traceback of the rank that failed first, or, when `timeout_s` has passed, with the
        Python stack of every rank. Either way those ranks are killed, and the next run has fresh ones.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size={world_size} is not in 1..{self.max_ranks}, the pool's max_ranks")
        task = _pickle_task(fn, args, kwargs)
        team = self._teams.pop(world_size, None) or self._start(world_size)
        try:
            return team.call(task, timeout_s)
        finally:
            if team.fit:
                self._teams[world_size] = team
            else:
                team.kill()

    def close(self) -> None:
        """End all ranks. The pool may be used again: it then starts new ones."""
        while self._teams:
            self._teams.popitem()[1].kill()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, world_size: int) -> "_Team":
        # Idle teams cost memory only; 16 + 8 + 4 + 2 + 1 fit in the bound.
        while self._teams and sum(self._teams) + world_size > 2 * self.max_ranks:
            self._teams.pop(next(iter(self._teams))).kill()
        _start_server(self._preload)
        return _Team(world_size, self.quiet)


class _Reply(NamedTuple):
    ok: bool
    at_s: float  # time.monotonic(): one clock for all processes of a machine
    payload: bytes  # the pickled result, or the traceback
    fit: bool = False  # to serve another run


class _Team:
    """The ranks of one world size, their pipes, and the store they meet at."""

    def __init__(self, world_size: int, quiet: bool) -> None:
        self.fit = False  # to serve another run
        self._folder = Path(tempfile.mkdtemp(prefix="fourfold-ranks-"))
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = _context.Pipe()
                seat = (theirs, rank, world_size, self._store.port, self._folder, quiet)
                # Not daemonic: a daemonic process may not have children, and data loaders have.
                process = _context.Process(target=_rank_main, args=seat, name=f"rank {rank} of {world_size}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            self._collect(HANG_S)
        except BaseException:
            self.kill()
            raise

    def call(self, task: bytes, timeout_s: float) -> list[Any]:
        self.fit = False
        for pipe in self._pipes:
            with suppress(OSError):  # that rank has died while idle: _collect names it
                pipe.send_bytes(task)
        replies = self._collect(timeout_s)
        self.fit = all(reply.fit for reply in replies)
        return [pickle.loads(reply.payload) for reply in replies]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=False):
            process.join()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, timeout_s: float) -> list[_Reply]:
        deadline_s = time.monotonic() + timeout_s
        replies: dict[int, _Reply] = {}
        while pending := [rank for rank in range(len(self._pipes)) if rank not in replies]:
            watched = {x: r for r in pending for x in (self._pipes[r], self._processes[r].sentinel)}
            ready = {watched[x] for x in wait(watched, max(0.0, deadline_s - time.monotonic()))}  # type: ignore[index]
            if not ready:
                break
            replies |= {rank: self._receive(rank) for rank in ready}
            if not all(replies[rank].ok for rank in ready):
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        if failures := {rank: reply for rank, reply in replies.items() if not reply.ok}:
            raise _rank_error(failures, pending)
        if pending:
            raise RankError(self._stacks(timeout_s, pending), None)
        return [replies[rank] for rank in sorted(replies)]

    def _receive(self, rank: int) -> _Reply:
        with suppress(EOFError, OSError):
            if self._pipes[rank].poll():  # a rank may have answered and then died: its answer counts
                return _Reply(*self._pipes[rank].recv())
        self._processes[rank].join(GRACE_S)
        code = self._processes[rank].exitcode or 0
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return _Reply(False, time.monotonic(), f"the process ended with exit code {code}{name}".encode())

    def _stacks(self, timeout_s: float, pending: list[int]) -> str:
        # A rank without its file has not registered the handler yet, and the signal would end it.
        files = {r: self._folder / f"stack-{r}" for r in range(len(self._processes))}
        asked = [rank for rank, file in files.items() if file.exists()]
        for rank in asked:
            if self._processes[rank].is_alive() and (pid := self._processes[rank].pid) is not None:
                os.kill(pid, signal.SIGUSR1)
        sizes: list[int] = []
        for _ in range(int(GRACE_S / 0.1)):
            time.sleep(0.1)
            before, sizes = sizes, [files[r].stat().st_size for r in asked]
            if all(sizes) and sizes == before:
                break
        lines = [f"no end after {timeout_s:g} s; still running: ranks {pending}. Every rank's stack:"]
        for rank, file in files.items():
            stack = file.read_text() if rank in asked else "the process is still starting"
            threads = [t for t in stack.split("\n\n") if _end_with_parent.__name__ not in t]
            state = "still running" if rank in pending else "has returned"
            lines.append(f"--- rank {rank} ({state})\n" + "\n\n".join(threads).rstrip())
        return "\n".join(lines)


def _rank_error(failures: dict[int, _Reply], pending: list[int]) -> RankError:
    texts = {rank: reply.payload.decode().rstrip() for rank, reply in failures.items()}
    # Gloo can tell peers of a death before this process sees it: what such a peer says is never the cause.
    peers = {rank for rank, text in texts.items() if re.search(r"Connection (closed|reset) by peer", text)}
    first, *others = sorted(texts, key=lambda rank: (rank in peers, failures[rank].at_s))
    lines = [f"rank {first} failed first:", texts[first]]
    lines += [f"then rank {rank}: {texts[rank].splitlines()[-1][:200]}" for rank in others]
    lines += [f"killed while still running, {GRACE_S:g} s later: ranks {pending}"] if pending else []
    return RankError("\n".join(lines), first)


def _pickle_task(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    typed_in = fn.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    if typed_in or "<locals>" in name or "<lambda>" in name:
        raise ValueError(f"other processes cannot import {name}: define it at the top level of a .py file")
    # Plain pickle, by value: multiprocessing's own pickler would move tensors to shared memory that dies with a rank.
    return pickle.dumps((list(sys.path), os.getcwd(), get_start_method(), pickle.dumps((fn, args, kwargs))))


def _start_server(preload: list[str]) -> None:
    """Start the fork server, if there is none yet, without OpenMP or BLAS threads: threads do not survive a fork."""
    # Python's fork server ignores the sys.path it is given (3.11), and then skips what it cannot import.
    wanted = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    saved = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ |= wanted
    try:
        _context.set_forkserver_preload(preload)
        forkserver.ensure_running()
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ |= saved


def _rank_main(pipe: Connection, rank: int, world: int, port: int, folder: Path, quiet: bool) -> None:
    gc.freeze()  # leaves the pages shared with the server untouched
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who then kills the ranks
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    # Named last: the file's presence says that the signal is safe to send.
    unnamed = folder / f"starting-{rank}"
    faulthandler.register(signal.SIGUSR1, file=unnamed.open("w"), all_threads=True)
    unnamed.rename(folder / f"stack-{rank}")
    if quiet and rank > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "MASTER_ADDR": HOST}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    # As under torchrun: the store is the caller's, and rank 0 does not open another.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)
    # Under a prefix of its own: if `fn` begins a group anew from the environment, it must not read this one's addresses.
    store = PrefixStore("pool", TCPStore(HOST, port, is_master=False))
    _answer(pipe, partial(dist.init_process_group, "gloo", store=store, rank=rank, world_size=world))
    group = dist.group.WORLD
    with suppress(EOFError):  # the caller has closed the pipe
        while True:
            _answer(pipe, partial(_run_task, pipe.recv_bytes()), group)


def _run_task(task: bytes) -> Any:
    sys.path[:], folder, start_method, call = pickle.loads(task)
    os.chdir(folder)
    set_start_method(start_method, force=True)  # else data loaders would start fork servers of their own
    fn, args, kwargs = pickle.loads(call)
    return fn(*args, **kwargs)


def _answer(pipe: Connection, work: Callable[[], Any], group: Any = None) -> None:
    try:
        ok, payload = True, pickle.dumps(work())
    except BaseException:
        ok, payload = False, traceback.format_exc().encode()
    # `fn` may have ended or replaced the process group, or made more groups than a process should keep.
    kept = dist.is_initialized() and group in (None, dist.group.WORLD)
    sys.stdout.flush()
    pipe.send(tuple(_Reply(ok, time.monotonic(), payload, kept and dist.get_pg_count() <= MAX_GROUPS)))


def _end_with_parent(folder: Path) -> None:
    """End this rank when the caller's process ends, however it ends."""
    if (parent := parent_process()) is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
