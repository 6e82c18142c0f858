"""A peer dies or hangs: how soon the others exit, and whether the report names the rank, the axis and the module.

The expected answer comes from the rank itself: before it stops, it writes which collectives it has started and which were
finished; an undisturbed run gives the next collective on each axis. The report has to name one that was in flight, or
the next one. With ``broken`` the hang watch is switched off.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.faults import traced_run
from benchmarks.faults.row import Row, all_right
from benchmarks.ranks import RankError, RankPool
from fourfold.config.run_file import load_run
from fourfold.drill.fault import Fault
from fourfold.drill.injector import Injector
from fourfold.mesh.collectives import InFlightCollective, Observer
from fourfold.mesh.grid import Grid
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.resilience.hang import HangDetector, LostRanks
from fourfold.train.resilience.hang.status import describe

Shape = tuple[int, int, int, int]
GRIDS: tuple[Shape, ...] = ((1, 2, 1, 2), (2, 1, 2, 1))
TIMEOUT_S = 3.0
GIVE_UP_S = 8.0  # ranks that take longer count as hung
DEAD_LIMIT_S, HUNG_LIMIT_S = 1.0, TIMEOUT_S + 1.0
STEPS = 8
STOPS = ("step", "forward", "collective", "gradients", "optimizer")


def run(small: bool, broken: bool = False) -> Iterator[Row]:
    with RankPool(4, quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
        yield from rows(pool, Path(folder), 2 if small else 20, broken)


def rows(pool: RankPool, folder: Path, trials: int, broken: bool) -> Iterator[Row]:
    file = traced_run.write(folder / "run")
    dead = [trial(pool, file, folder / f"dead-{n}", "kill", n, {}, broken) for n in range(trials)]
    yield time_row(
        f"a rank is killed, {trials} times on 4 ranks: all others exit",
        dead,
        DEAD_LIMIT_S,
        "Gloo: 33 ms until the others see an error; no report (measured with torch 2.13, one machine, no Fourfold)",
    )
    sequences = {shape: pool.run(collective_order, 4, str(file), shape) for shape in GRIDS[:trials]}
    hung = [trial(pool, file, folder / f"hung-{n}", "stop", n, sequences, broken) for n in range(trials)]
    yield time_row(
        f"a rank hangs, {trials} times on 4 ranks, timeout {TIMEOUT_S:g} s: all others exit",
        hung,
        HUNG_LIMIT_S,
        "Gloo: the timeout + 30 ms; a DeviceMesh's groups: 30 minutes, whatever was set (measured with torch 2.13, one machine, no Fourfold)",
    )
    wrong = [t.wrong for t in hung if t.wrong]
    yield all_right(
        f"a rank hangs, {trials} times, on {' and '.join(map(str, GRIDS))}: rank, axis and module in the report are right",
        trials,
        wrong,
        "PyTorch 2.13 names neither; its flight recorder has numbers of collectives (measured with torch 2.13, one machine, no Fourfold)",
    )


def time_row(what: str, trials: Sequence[Trial], limit_s: float, others: str) -> Row:
    longest = max(t.longest_s for t in trials)
    middle = sorted(t.longest_s for t in trials)[len(trials) // 2]
    return Row(
        what,
        f"{longest:.2f} s at most, {middle:.2f} s median",
        f"{limit_s:g} s",
        longest <= limit_s,
        others,
    )


@dataclass(frozen=True)
class Trial:
    longest_s: float  # until the last of the others has exited
    wrong: str = ""  # in the report


def random_fault(action: Any, number: int) -> tuple[Shape, Fault]:
    choose = random.Random(f"{action} {number}")
    at: Any = choose.choice(STOPS)
    nth = choose.randint(1, 12) if at in ("forward", "collective") else 1
    fault = Fault(action, at, choose.randrange(4), choose.randint(3, 6), nth=nth)
    return GRIDS[number % len(GRIDS)], fault


def trial(
    pool: RankPool,
    file: Path,
    folder: Path,
    action: Any,
    number: int,
    sequences: dict[Shape, list[Any]],
    broken: bool = False,
) -> Trial:
    shape, fault = random_fault(action, number)
    folder.mkdir()
    others = [rank for rank in range(4) if rank != fault.rank]
    with ThreadPoolExecutor() as executor:
        ends = executor.submit(wait_for_ends, folder, others)
        with suppress(RankError):
            pool.run(
                train_until_lost,
                4,
                str(file),
                shape,
                fault,
                str(folder),
                broken,
                timeout_s=30 if broken else 120,
            )
    noted = list((folder / "faults").glob("*"))
    if not noted:
        return Trial(math.inf, f"{fault} did not happen")
    took_s = [end_s - noted[0].stat().st_mtime for end_s in ends.result().values()]
    longest_s = max(took_s) if len(took_s) == len(others) else math.inf
    return Trial(longest_s, wrong_with(folder, fault, shape, sequences.get(shape)))


def wait_for_ends(folder: Path, ranks: Sequence[int]) -> dict[int, float]:
    """When the processes of these ranks exited; those that run `GIVE_UP_S` after the fault are left out."""
    found: dict[int, float] = {}
    deadline_s = time.time() + 110
    while len(found) < len(ranks) and time.time() < deadline_s:
        time.sleep(0.005)
        for note in (folder / "faults").glob("*"):
            deadline_s = note.stat().st_mtime + GIVE_UP_S
        for rank in ranks:
            file = folder / f"process-{rank}"
            if rank not in found and file.exists() and (text := file.read_text()):
                try:
                    state = Path(f"/proc/{text}/stat").read_text().rsplit(")", 1)[1].split()[0]
                except OSError:
                    state = "Z"
                if state == "Z":
                    found[rank] = time.time()
    return found


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Diary(Callback, Observer):
    """Records the collectives of each axis, independently of the code under test."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.words: dict[str, list[str]] = defaultdict(list)
        self._flights: list[tuple[str, int, InFlightCollective]] = []

    @contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        trainer.grid.collectives.observers.append(self)
        yield

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None:
        self.words[flight.axis].append(describe(flight))
        self._flights = [
            item for item in self._flights if not item[2].work or not item[2].work.is_completed()
        ]
        self._flights.append((flight.axis, len(self.words[flight.axis]), flight))

    def waited(self, flight: InFlightCollective) -> None:
        self._flights = [item for item in self._flights if item[2] is not flight]

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        time.sleep(0.05)  # long enough for heartbeats between steps

    def write(self) -> None:
        """Write which collectives this rank has started, and which may not be finished."""
        assert self._folder is not None
        begun = {axis: len(words) for axis, words in self.words.items()}
        in_flight = [(axis, number) for axis, number, _ in self._flights]
        (self._folder / "diary.json").write_text(json.dumps({"begun": begun, "in flight": in_flight}))


class RecordingInjector(Injector):
    """Writes the diary before each fault."""

    def __init__(self, fault: Fault, diary: Diary, record: Path) -> None:
        super().__init__([fault], record=record)
        self._fault, self._diary = fault, diary

    @contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        with super().around_run(trainer):
            trigger = self._faults.trigger
            mine = self._fault.rank == dist.get_rank()

            def recording(at: Any, name: str = "", step: int | None = None) -> list[Fault]:
                if mine and self._fault.matches(at, self._faults.step if step is None else step, name):
                    self._diary.write()
                return trigger(at, name, step)

            self._faults.trigger = recording  # type: ignore[method-assign]
            yield


def train_until_lost(file: str, shape: Shape, fault: Fault, folder: str, broken: bool) -> None:
    where = Path(folder)
    diary = Diary(where)
    watch = [] if broken else [HangDetector(TIMEOUT_S, 60.0, where / "hang")]
    trainer = Trainer(
        config(file, shape),
        Grid.create(shape),
        [diary, *watch, RecordingInjector(fault, diary, where / "faults")],
    )
    (where / f"process-{dist.get_rank()}").write_text(str(os.getpid()))
    try:
        trainer.train()
    except LostRanks:
        os._exit(1)  # as a run does


def collective_order(file: str, shape: Shape) -> dict[str, list[str]]:
    diary = Diary()
    Trainer(config(file, shape), Grid.create(shape), [diary]).train()
    return dict(diary.words)


def config(file: str, shape: Shape) -> Any:
    return load_run(Path(file), [*traced_run.grid_changes(shape), f"schedule.steps={STEPS}"])


# -- checks of the report -----------------------------------------------------------------------------------------------------


def wrong_with(folder: Path, fault: Fault, shape: Shape, sequences: list[dict[str, list[str]]] | None) -> str:
    """What is wrong in the report; empty if it is right."""
    if sequences is None:
        return ""
    summary = folder / "hang" / "summary.txt"
    if not summary.exists():
        return f"{fault}: no report"
    first = summary.read_text().splitlines()[0]
    found = re.match(r"(?P<words>.*), step (?P<step>\d+): (?P<who>ranks? [\d, and]+) never arrived", first)
    if found is None or found["who"] != f"rank {fault.rank}":
        return f"{fault}: the report says {first!r:.200}"
    diary = json.loads((folder / "diary.json").read_text())
    own = sequences[fault.rank]
    begun = {axis: diary["begun"].get(axis, 0) for axis in own}
    expected = {own[axis][count] for axis, count in begun.items() if count < len(own[axis])}
    expected |= {own[axis][number - 1] for axis, number in diary["in flight"]}
    if found["words"] not in expected:
        return f"{fault}: the report says {found['words']!r}, and not one of {sorted(expected)}"
    return ""
