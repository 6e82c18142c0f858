"""A thread that notices when a collective takes too long, and finds the missing rank together with the other ranks.

Ranks communicate through the store, because collectives no longer work then. Each sends heartbeats, at a rate that is bounded
for all ranks together. Their age is measured by the clock of the rank that judges: heartbeats are numbered by a counter in
the store, so a heartbeat is at least as old as the first of this rank's own heartbeats that has a higher number.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

# No public name for the store of the rendezvous, nor for the flight recorder (seen in torch 2.13.0).
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _get_default_store

from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.resilience.hang.status import JSON, CollectiveTracker, RankStatus
from fourfold.train.resilience.hang.summary import describe_status, find_missing, summarise

HEARTBEAT_S = 0.25  # between two heartbeats of a rank,
HEARTBEATS_PER_S = 1000  # but no more of all ranks together; each is two requests to the store
OWN_HEARTBEATS = 4096  # whose times a rank keeps
QUIET_S = 0.2  # without another report: no more are expected
POLL_S = 0.05
EXIT_S = 0.4  # for the main thread to end by itself after the report
REPORT_S = 5.0  # for the whole report
# How much later than the monitor the backend times out. NCCL's watchdog ends the process, so the report has to be written by then.
BACKEND_LATER_S = {"cpu": 0.4, "cuda": 2 * REPORT_S}

_monitors = 0  # created so far; all ranks create them in the same order


class Monitor:
    """Monitors one rank from `start` to `stop`."""

    def __init__(
        self,
        tracker: CollectiveTracker,
        shape: Sequence[int],
        folder: Path,
        main: int,
        *,
        ends_process: bool,
        sequence_ranks: int = 1,
    ) -> None:
        global _monitors
        _monitors += 1
        self._tracker, self._shape, self._folder, self._main = tracker, shape, folder, main
        self._sequence_ranks = sequence_ranks
        self._ends_process = ends_process
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._prefix = f"fourfold/hang/{_monitors}"  # the store is new in each attempt
        # A connection of its own: that of the main thread is locked while the main thread waits at it.
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._heartbeat_s = max(HEARTBEAT_S, self._ranks / HEARTBEATS_PER_S)
        self._own_beats: deque[tuple[int, float]] = deque(maxlen=OWN_HEARTBEATS)  # number, time by this clock
        self.timeout_s = float("inf")
        self._stops = threading.Event()
        self._lock = threading.Lock()
        self._summary: str | None = None
        self._thread = threading.Thread(target=self._watch, name="hang monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stops.set()
        self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        last_beat_s = stalled_since_s = 0.0
        while not self._stops.wait(POLL_S):
            now_s = time.monotonic()
            if now_s - last_beat_s >= self._heartbeat_s:
                last_beat_s = now_s
                _attempt(self._send_heartbeat)
            if self._tracker.error or self._tracker.oldest_s() > self.timeout_s:
                self.report(self._tracker.error or f"no answer for {self.timeout_s:g} s")
                # The main thread may wait for something else, with a timeout of its own.
                if not self._stops.wait(EXIT_S) and self._ends_process:
                    os._exit(1)
                return
            idle_s = now_s - self._tracker.progress_s
            if idle_s > self.timeout_s and self._tracker.progress_s != stalled_since_s:
                # It waits in no collective: others wait for it, or it saves.
                stalled_since_s = self._tracker.progress_s
                status = describe_status(self._tracker.status())
                _log(f"rank {self._rank}: no progress for {idle_s:.0f} s; {status}")

    def _send_heartbeat(self) -> None:
        number = self._store.add(f"{self._prefix}/beats", 1)
        self._own_beats.append((number, time.monotonic()))
        self._store.set(
            f"{self._prefix}/seen/{self._rank}", JSON.dump_json(self._tracker.status(beat=number))
        )

    def _with_age(self, status: RankStatus) -> RankStatus:
        later_s = next((at_s for number, at_s in list(self._own_beats) if number > status.beat), None)
        return replace(status, age_s=0.0 if later_s is None else time.monotonic() - later_s)

    def report(self, error: str) -> str:
        """Report the status of this rank, once; the first rank to report writes a summary, which rank 0 repeats."""
        if self._ends_process:
            # On a host without a network, a call of the store does not return.
            limit = threading.Timer(REPORT_S, os._exit, [1])
            limit.daemon = True
            limit.start()
        with self._lock:  # the main thread may call this too, when its collective fails
            if self._summary is None:
                self._summary = self._report(error)
            return self._summary

    def _report(self, error: str) -> str:
        status = self._tracker.status(error)
        _attempt(lambda: self._write(status))
        own = f"rank {self._rank}: {describe_status(status)}; {error.strip().splitlines()[-1][:200]}"
        # The store may be gone with the process that held it.
        summary, is_first = _attempt(lambda: self._share(status)) or (None, False)
        if summary is None:
            _log(own)
        elif self._rank == 0 or is_first:
            _log(summary)
        return summary or own

    def _share(self, status: RankStatus) -> tuple[str | None, bool]:
        """The summary, if this rank waits for it; is it the first to report?"""
        number = self._store.add(f"{self._prefix}/reports", 1)
        self._store.set(f"{self._prefix}/report/{number}", JSON.dump_json(status))
        if number == 1:
            summary = self._summarise()
            self._store.set(f"{self._prefix}/summary", summary)
            with suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / "summary.txt").write_text(summary + "\n")
            return summary, True
        if self._rank == 0:
            # People look at the output of rank 0.
            deadline_s = time.monotonic() + 3 * QUIET_S
            while time.monotonic() < deadline_s:
                if self._store.check([f"{self._prefix}/summary"]):
                    return str(self._store.get(f"{self._prefix}/summary").decode()), False
                time.sleep(POLL_S / 5)
        return None, False

    def _summarise(self) -> str:
        reports: dict[int, RankStatus] = {}
        last_s, number = time.monotonic(), 0
        # Until all ranks have reported, or none has for a while.
        while len(reports) < self._ranks and time.monotonic() - last_s < QUIET_S:
            while (status := self._read(f"report/{number + 1}")) is not None:
                reports[status.rank] = status
                last_s, number = time.monotonic(), number + 1
            time.sleep(POLL_S / 5)
        silent = set(range(self._ranks)) - set(reports)
        heartbeats = {r: self._with_age(s) for r in silent if (s := self._read(f"seen/{r}")) is not None}
        # A rank that is starved of CPU time is late with a heartbeat, and not dead.
        stale_s = max(2 * self._heartbeat_s, min(10.0, self.timeout_s / 2))
        return summarise(
            find_missing(
                reports, heartbeats, self._shape, stale_s=stale_s, sequence_ranks=self._sequence_ranks
            ),
            reports,
        )

    def _read(self, key: str) -> RankStatus | None:
        key = f"{self._prefix}/{key}"
        return JSON.validate_json(self._store.get(key)) if self._store.check([key]) else None

    def _write(self, status: RankStatus) -> None:
        """Write the report of this rank, with its stack, and the flight recorder's trace."""
        frame = sys._current_frames().get(self._main)
        stack = traceback.format_stack(frame) if frame is not None else []
        self._folder.mkdir(parents=True, exist_ok=True)
        body = json.dumps({**asdict(status), "time": time.time(), "stack": stack}, indent=1)
        (self._folder / f"rank-{self._rank}.json").write_text(body)
        (self._folder / f"rank-{self._rank}.flights.json").write_bytes(_flight_recorder())


class LostRanks(RuntimeError):
    """A collective did not finish: a rank is dead, stopped or behind. The message names it."""


class HangDetector(Callback):
    """``first_step_timeout_s`` bounds the first step, in which much is built; ``timeout_s`` those after it.

    With ``ends_process`` a rank exits after its report, even if its main thread waits for something else.
    """

    def __init__(
        self, timeout_s: float, first_step_timeout_s: float, folder: Path, *, ends_process: bool = True
    ) -> None:
        self._ends_process = ends_process
        self._timeout_s, self._first_s, self._folder = timeout_s, max(timeout_s, first_step_timeout_s), folder
        self._monitor: Monitor | None = None

    @contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        if dist.get_world_size() == 1:  # no rank to wait for
            yield
            return
        grid = trainer.grid
        tracker = CollectiveTracker(
            dist.get_rank(),
            lambda: (trainer.step + 1, trainer.activity),
            host_waits=grid.device.type != "cuda",
        )
        monitor = self._monitor = Monitor(
            tracker,
            grid.shape,
            self._folder,
            threading.get_ident(),
            ends_process=self._ends_process,
            sequence_ranks=grid.sequence_ranks,
        )
        self._set_timeout(trainer, self._first_s)
        grid.collectives.observers.append(tracker)
        monitor.start()
        try:
            yield
        except Exception as error:
            summary = monitor.report(f"{type(error).__name__}: {error}")
            if is_from_collective(error):
                raise LostRanks(summary) from error
            raise
        finally:
            monitor.stop()
            grid.collectives.observers.remove(tracker)
            self._monitor = None

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._monitor is not None and self._monitor.timeout_s != self._timeout_s:
            self._set_timeout(trainer, self._timeout_s)

    def _set_timeout(self, trainer: Trainer, seconds: float) -> None:
        assert self._monitor is not None
        self._monitor.timeout_s = seconds
        trainer.grid.set_timeout(seconds + BACKEND_LATER_S[trainer.grid.device.type])


def is_from_collective(error: BaseException) -> bool:
    """Does the error come from the backend? Gloo raises plain RuntimeErrors that name its files (seen in torch 2.13.0)."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def _flight_recorder() -> bytes:
    """PyTorch's record of the last collectives, as JSON; NCCL has one of its own."""
    dump = (
        c10d._dump_nccl_trace_json if dist.get_backend() == "nccl" else c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    )
    return cast(bytes, dump())


def _attempt(work: Callable[[], Any]) -> Any:
    """None if it fails: whatever fails in a report, the report continues."""
    with suppress(Exception):
        return work()
    return None


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
