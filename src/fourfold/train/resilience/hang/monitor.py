"""The thread beside a run that notices when a collective takes too long, and tells the others through the store.

It asks for no collective: what it has to say, it says when collectives no longer work. Signs of life go to the store at
a rate that is bounded for all ranks together.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

# No public name for the store that ranks met at, nor for the flight recorder on Gloo (seen in torch 2.13.0).
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from fourfold.train.resilience.hang.place import Place, Watch
from fourfold.train.resilience.hang.summary import find_missing, line_of, summarise

BEAT_S = 0.25  # between two signs of life of a rank,
BEATS_PER_S = 2000  # but no more of all ranks together
QUIET_S = 0.2  # without another report: all have reported that will
LOOK_S = 0.05
LEAVE_S = 0.4  # for the main thread to end by itself, once all is said

REPORT_S = 5.0  # for all of a report

_monitors = 0  # made so far; all ranks make them alike


class Monitor:
    """Watches one rank from `start` to `stop`."""

    def __init__(
        self, watch: Watch, shape: tuple[int, ...], folder: Path, main: int, *, ends_process: bool
    ) -> None:
        global _monitors
        _monitors += 1
        self._watch, self._shape, self._folder, self._main = watch, shape, folder, main
        self._ends_process = ends_process
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._prefix = f"fourfold/hang/{_monitors}"  # the store is of this attempt alone
        # A connection of its own: the one of the main thread is locked while that one waits at it.
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._beat_s = max(BEAT_S, self._ranks / BEATS_PER_S)
        self.timeout_s = float("inf")
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._summary: str | None = None
        self._thread = threading.Thread(target=self._watch_on, name="hang monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(timeout=2.0)

    def _watch_on(self) -> None:
        beat_s = stalled_s = 0.0
        while not self._ends.wait(LOOK_S):
            now_s = time.monotonic()
            if now_s - beat_s >= self._beat_s:
                beat_s = now_s
                self._try(
                    lambda: self._store.set(f"{self._prefix}/seen/{self._rank}", _dump(self._watch.place()))
                )
            if self._watch.error or self._watch.oldest_s() > self.timeout_s:
                self.report(self._watch.error or f"no answer for {self.timeout_s:g} s")
                # The main thread may still wait for something: each of its waits has a time of its own.
                if not self._ends.wait(LEAVE_S) and self._ends_process:
                    os._exit(1)
                return
            idle_s = now_s - self._watch.progress_s
            if idle_s > self.timeout_s and self._watch.progress_s != stalled_s:
                # It waits for nobody in a collective: it is others who wait for it, or it saves.
                stalled_s = self._watch.progress_s
                place = self._watch.place()
                self._say(f"rank {self._rank}: nothing moved for {idle_s:.0f} s; {line_of(place)}")

    def report(self, error: str) -> str:
        """Say where this rank stands, once; the first that does so sums up what all say, and rank 0 repeats it."""
        if self._ends_process:
            # On a host that is cut off, a call of the store does not return.
            limit = threading.Timer(REPORT_S, os._exit, [1])
            limit.daemon = True
            limit.start()
        with self._lock:  # the main thread may come here too, when its collective fails
            if self._summary is None:
                self._summary = self._report(error)
            return self._summary

    def _report(self, error: str) -> str:
        place = self._watch.place(error)
        self._write(place)
        own = f"rank {self._rank}: {line_of(place)}; {error.strip().splitlines()[-1][:200]}"
        found = self._try(lambda: self._tell(place))
        if found is None:
            self._say(own)
        elif self._rank == 0 or self._is_first:
            self._say(found)
        return found or own

    _is_first = False

    def _tell(self, place: Place) -> str | None:
        number = self._store.add(f"{self._prefix}/reports", 1)
        self._store.set(f"{self._prefix}/report/{number}", _dump(place))
        self._is_first = number == 1
        if self._is_first:
            summary = self._sum_up()
            self._store.set(f"{self._prefix}/summary", summary)
            with _suppressed():
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / "summary.txt").write_text(summary + "\n")
            return summary
        if self._rank == 0:
            # It is rank 0's output that people look at.
            deadline_s = time.monotonic() + 3 * QUIET_S
            while time.monotonic() < deadline_s:
                if self._store.check([f"{self._prefix}/summary"]):
                    return str(self._store.get(f"{self._prefix}/summary").decode())
                time.sleep(LOOK_S / 5)
        return None

    def _sum_up(self) -> str:
        reports: dict[int, Place] = {}
        last_s = time.monotonic()
        number = 0
        # Until all have reported, or nobody has for a moment.
        while len(reports) < self._ranks and time.monotonic() - last_s < QUIET_S:
            while self._store.check([f"{self._prefix}/report/{number + 1}"]):
                number += 1
                place = _load(self._store.get(f"{self._prefix}/report/{number}"))
                reports[place.rank] = place
                last_s = time.monotonic()
            time.sleep(LOOK_S / 5)
        seen = {}
        for rank in set(range(self._ranks)) - set(reports):
            if self._store.check([f"{self._prefix}/seen/{rank}"]):
                seen[rank] = _load(self._store.get(f"{self._prefix}/seen/{rank}"))
        now_s = time.time()
        # A rank that is starved of its core is late with a sign of life, and not dead.
        stale_s = max(2 * self._beat_s, min(10.0, self.timeout_s / 2))
        found = find_missing(reports, seen, self._shape, now_s=now_s, stale_s=stale_s)
        return summarise(found, reports, now_s=now_s)

    def _write(self, place: Place) -> None:
        """The rank's own report, its stack, and what the flight recorder has."""
        frame = sys._current_frames().get(self._main)
        stack = traceback.format_stack(frame) if frame is not None else []
        with _suppressed():
            self._folder.mkdir(parents=True, exist_ok=True)
            body = json.dumps({**place.to_json(), "stack": stack}, indent=1)
            (self._folder / f"rank-{self._rank}.json").write_text(body)
            recorded = _dump_fr_trace_json()
            (self._folder / f"rank-{self._rank}.flights.json").write_bytes(recorded)

    def _try(self, work: Callable[[], Any]) -> Any:
        """The store may be gone with the process that held it."""
        with _suppressed():
            return work()
        return None

    def _say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)


class _suppressed:  # noqa: N801
    """Whatever fails in a report, the report goes on."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is not None and issubclass(kind, Exception)


def _dump(place: Place) -> str:
    return json.dumps(place.to_json())


def _load(text: bytes) -> Place:
    return Place.from_json(json.loads(text))
