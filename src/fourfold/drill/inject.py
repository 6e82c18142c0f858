"""Faults planted in this process: who counts how often their place was met, and what then happens."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fourfold.checkpoint import folder as files
from fourfold.checkpoint.commit import step_of
from fourfold.drill.fault import FILE_POINTS, Fault, Point


class Planted:
    """The faults of one rank.

    ``spent``, a folder, remembers across restarts which of them have happened: they do so once.
    """

    def __init__(self, faults: Sequence[Fault], rank: int, spent: Path | None = None) -> None:
        self.faults = [fault for fault in faults if fault.rank == rank]
        self._spent = spent
        self._met = dict.fromkeys(self.faults, 0)
        self.step = 1  # the one under way

    def meet(self, at: Point, name: str = "", step: int | None = None) -> list[Fault]:
        """The faults that happen here and now; the ones that end or stop the process do so."""
        due = []
        for fault in self.faults:
            if not fault.matches(at, self.step if step is None else step, name):
                continue
            self._met[fault] += 1
            lasting = fault.action == "slow"
            if (self._met[fault] < fault.nth) if lasting else (self._met[fault] != fault.nth):
                continue
            if (lasting and self._met[fault] > fault.nth) or self._spend(fault):
                due.append(fault)
        for fault in due:
            happen(fault)
        return due

    def happen_once(self, fault: Fault) -> None:
        """Now, wherever the rank is."""
        if self._spend(fault):
            happen(fault)

    def _spend(self, fault: Fault) -> bool:
        """Note that it happens, before it does; False if it has already."""
        if self._spent is None:
            return True
        self._spent.mkdir(parents=True, exist_ok=True)
        try:
            # Not through the calls below: the note is no part of what is disturbed.
            os.close(os.open(self._spent / f"{fault}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def happen(fault: Fault) -> None:
    """What can happen anywhere; the rest is for those who have a gradient, a weight or a file in hand."""
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "slow":
        time.sleep(fault.seconds)


class FaultyCalls(files.FileCalls):
    """The system calls of a save, with faults among them."""

    def __init__(self, planted: Planted) -> None:
        self._planted = planted

    def write(self, descriptor: int, view: memoryview, path: Path) -> int:
        # In the middle: half of it is there already.
        half = super().write(descriptor, view[: len(view) // 2], path) if self._is_watched("write") else 0
        self._fail("write", path)
        return half + super().write(descriptor, view[half:], path)

    def fsync(self, descriptor: int, path: Path) -> None:
        self._fail("fsync", path)
        super().fsync(descriptor, path)

    def rename(self, source: Path, target: Path) -> None:
        self._fail("rename", source)
        super().rename(source, target)
        self._fail("renamed", source)

    def remove(self, path: Path) -> None:
        self._fail("remove", path)
        super().remove(path)

    def _is_watched(self, at: Point) -> bool:
        return any(fault.at == at for fault in self._planted.faults)

    def _fail(self, at: Point, path: Path) -> None:
        # The step that is saved, not the one that is computed meanwhile.
        steps = [step for part in path.parts if (step := step_of(part.removesuffix(".tmp"))) is not None]
        for fault in self._planted.meet(at, path.name, steps[-1] if steps else None):
            if fault.action in ("eio", "enospc"):
                number = errno.EIO if fault.action == "eio" else errno.ENOSPC
                raise OSError(number, os.strerror(number), str(path))


@contextmanager
def in_files(planted: Planted) -> Iterator[None]:
    """The saves of this process meet the faults."""
    if not any(fault.at in FILE_POINTS for fault in planted.faults):
        yield
        return
    before, files.calls = files.calls, FaultyCalls(planted)
    try:
        yield
    finally:
        files.calls = before


class Ended(BaseException):
    """This process would be dead by now."""


class CutShort(files.FileCalls):
    """Ends after so many calls: what the disk has then is what a kill there leaves, without a process to start anew."""

    def __init__(self, calls: int | None = None) -> None:
        self.done: list[str] = []
        self._left = calls

    def _next(self, what: str, path: Path) -> None:
        if self._left is not None:
            if self._left == 0:
                raise Ended(what)
            self._left -= 1
        self.done.append(f"{what} {path.name}")

    def write(self, descriptor: int, view: memoryview, path: Path) -> int:
        half = super().write(descriptor, view[: len(view) // 2], path)
        self._next("write", path)
        return half + super().write(descriptor, view[half:], path)

    def fsync(self, descriptor: int, path: Path) -> None:
        self._next("fsync", path)
        super().fsync(descriptor, path)

    def rename(self, source: Path, target: Path) -> None:
        self._next("rename", source)
        super().rename(source, target)
        self._next("renamed", source)

    def remove(self, path: Path) -> None:
        self._next("remove", path)
        super().remove(path)


@contextmanager
def cut_short(calls: int | None = None) -> Iterator[CutShort]:
    """Saves inside end after so many system calls, with `Ended`; with None they are only written down."""
    before = files.calls
    files.calls = planted = CutShort(calls)
    try:
        yield planted
    finally:
        files.calls = before
