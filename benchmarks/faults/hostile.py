"""Hostile files: malicious checkpoints, weights, data and configurations, and the code that reads them.

One process reads all of them with Python's audit events, which report every opened file, all executed code and every class
requested by a pickle; a limit on the address space stops unbounded allocations. With ``broken`` they are read as stock
PyTorch and a trusting reader would.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.faults import traced_run
from benchmarks.faults.hostile_corpus import Corpus
from benchmarks.faults.row import Row
from benchmarks.memory import resident_mb
from benchmarks.ranks import RankPool

ROOM_BYTES = 512 * 2**20  # of address space in addition to the current size
GROWTH_MB = 64.0  # memory growth over the corpus
FUZZED = 1500
# Events that no file reader needs; `exec` is checked by the origin of its code.
FORBIDDEN = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
}


def run(small: bool, broken: bool = False) -> Iterator[Row]:
    with RankPool(2, quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
        yield from rows(pool, Path(folder), FUZZED // 10 if small else FUZZED, broken)


def rows(pool: RankPool, folder: Path, fuzzed: int, broken: bool) -> Iterator[Row]:
    file = traced_run.write(folder / "run")
    (seen,) = pool.run(read_corpus, 1, str(file), str(folder / "corpus"), fuzzed, broken, timeout_s=900)
    what = f"{seen['cases']} hostile checkpoints, weights, headers, data sets and configurations"
    first = seen["executed"][0] if seen["executed"] else ""
    yield Row(
        f"{what}: code executed",
        f"{len(seen['executed'])} {first}".strip(),
        "0",
        not seen["executed"],
        "PyTorch 2.13's DCP runs code in `.metadata` (measured with torch 2.13, one machine, no Fourfold)",
    )
    yield Row(
        f"{what}: files opened outside their folder",
        f"{len(seen['escaped'])} {seen['escaped'][0] if seen['escaped'] else ''}".strip(),
        "0",
        not seen["escaped"],
        "none of nine projects tests it (a search of their tests)",
    )
    yield Row(
        f"{what}: memory above the first read",
        f"{seen['grown_mb']:.0f} MB",
        f"{GROWTH_MB:.0f} MB",
        seen["grown_mb"] <= GROWTH_MB,
        "none found",
    )
    yield Row(
        f"{what}: read, or rejected with a message",
        f"{seen['cases'] - len(seen['crashed'])}/{seen['cases']}, {seen['rejected']} rejected"
        + (f"; {seen['crashed'][0]}" if seen["crashed"] else ""),
        "all, at least half rejected",
        not seen["crashed"] and seen["rejected"] >= seen["cases"] / 2,
        "none found",
    )


class Guard:
    """An audit hook, which cannot be removed and therefore records only while it is ``on``."""

    def __init__(self, inside: Path, outside: Path) -> None:
        self._inside, self._outside = str(inside), (str(outside), "/etc/passwd")
        self.on = False
        self.executed: list[str] = []
        self.escaped: list[str] = []
        sys.addaudithook(self._record)

    def _record(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in FORBIDDEN:
            self.executed.append(f"{event} {args[:2]!r:.100}")
        elif event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(self._inside):
            self.executed.append(f"{event} {args[0].co_filename}")
        elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(args[0]))
            if path.startswith(self._outside):
                self.escaped.append(path)


def read_corpus(file: str, folder: str, fuzzed: int, broken: bool) -> dict[str, Any]:
    """On one rank: create and read the corpus case by case; what was observed."""
    corpus = Corpus(Path(file), Path(folder))
    guard = Guard(corpus.inside, corpus.outside)
    rejected, crashed, cases = 0, [], 0
    for read in corpus.readers():  # imports and caches of readers do not count as growth
        read()
    # Reset VmHWM, which includes this rank's earlier work.
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = resident_mb("VmHWM")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with ExitStack() as ends:
        ends.enter_context(redirect_stdout(StringIO()))
        ends.enter_context(redirect_stderr(StringIO()))
        if broken:
            ends.enter_context(patch("fourfold.untrusted_input.plain_name", lambda name: name))
        resource.setrlimit(resource.RLIMIT_AS, (in_use + ROOM_BYTES, limits[1]))
        ends.callback(resource.setrlimit, resource.RLIMIT_AS, limits)
        for name, read in corpus.cases(fuzzed, broken):
            cases += 1
            guard.on = True
            try:
                read()
            except (ValueError, OSError):
                rejected += 1
            except Exception as error:
                crashed.append(f"{name}: {error!r:.200}")
            finally:
                guard.on = False
    grown_mb = resident_mb("VmHWM") - before_mb
    if corpus.marker.exists():
        guard.executed.append(f"{corpus.marker} exists")
    return {
        "cases": cases,
        "rejected": rejected,
        "crashed": crashed,
        "executed": guard.executed,
        "escaped": guard.escaped,
        "grown_mb": grown_mb,
    }
