"""Faults of checkpoints: saves interrupted after each system call, damaged files, failing disks.

With ``broken`` the protection is switched off, so that each row fails: files are written in place instead of renamed,
sizes are compared instead of hashes, and disk errors are ignored.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.faults import traced_run
from benchmarks.faults.damage import damage, swap_files
from benchmarks.faults.row import Row, all_right
from benchmarks.ranks import RankPool
from fourfold.checkpoint import Checkpoints, SaveError, commit
from fourfold.checkpoint.commit import newest_valid, steps
from fourfold.checkpoint.folder import LocalFolder, open_folder
from fourfold.checkpoint.manifest import find_damage
from fourfold.checkpoint.state import TrainState
from fourfold.config.run_file import load_run
from fourfold.drill.fault import Action, Fault, Point
from fourfold.drill.injector import RankFaults, faults_in_files, hooked_files
from fourfold.mesh.grid import Grid
from fourfold.train.loop.trainer import Trainer

DCP = "PyTorch 2.13's DCP"
SAVE = Checkpoints._save
SMALL_EVERY = 9  # of the writes of one file, in the small version


def run(small: bool, broken: bool = False) -> Iterator[Row]:
    with RankPool(4, quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
        yield crash_points(pool, Path(folder, "crash"), small, broken)
        yield corruptions(pool, Path(folder, "damage"), 100 if small else 1000, broken)
        yield disk_errors(pool, Path(folder, "disk"), 12 if small else 100, broken)


# -- a run to save -----------------------------------------------------------------------------------------------------


def trained(file: Path, ranks: int, count: int) -> TrainState:
    """The small run after ``count`` steps, sharded over z."""
    config = load_run(file, [f"grid.z={ranks}", f"schedule.steps={count}"])
    trainer = Trainer(config, Grid.create((1, ranks, 1, 1)))
    trainer.train()
    return trainer.training


def numbers(training: TrainState) -> list[Tensor]:
    """This rank's weights and optimizer state."""
    pairs: Any = training.optimizer._pairs  # type: ignore[attr-defined]
    states = [training.optimizer.state[shard] for _, shard in pairs]
    found = [cast(DTensor, p).to_local() for p in training.model.parameters()]
    found += [state[kind] for state in states for kind in sorted(state)]
    return [tensor.detach().clone() for tensor in found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def newest(root: Path) -> tuple[int | None, dict[int, list[str]]]:
    folder = open_folder(root)
    return newest_valid(steps(folder), lambda s: find_damage(folder.child(commit.step_name(s)), s))


# -- interrupted saves -------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Raised where a kill would have ended the process."""


@contextmanager
def interrupt_after(calls: int | None = None) -> Iterator[list[str]]:
    """Interrupt saves after N system calls, which leaves the disk as a kill would; None only lists the calls."""
    done: list[str] = []

    def count(at: Point, path: Path) -> None:
        if len(done) == calls:
            raise Interrupted(at)
        done.append(f"{at} {path.name}")

    with hooked_files(count):
        yield done


@contextmanager
def in_place() -> Iterator[None]:
    """A save without protection: written directly under its final name, and not checked."""
    with ExitStack() as patches:
        patches.enter_context(
            patch.object(commit, "unfinished", lambda root, step: root.child(commit.step_name(step)))
        )
        patches.enter_context(patch.object(LocalFolder, "rename", lambda *_: None))
        patches.enter_context(patch("fourfold.checkpoint.save.find_damage", lambda *_, **__: []))
        yield


def interrupted_saves(file: str, folder: str, small: bool, broken: bool) -> tuple[int, list[str]]:
    """(number of points, those after which neither the old nor the new checkpoint loaded); each rank is interrupted."""
    rank, ranks, where = dist.get_rank(), dist.get_world_size(), Path(folder)
    old, training = trained(Path(file), ranks, 1), trained(Path(file), ranks, 2)
    states = {1: numbers(old), 2: numbers(training)}
    # A single rank also removes the old checkpoint; several ranks would wait forever for the interrupted one.
    keep = 1 if ranks == 1 else None
    with Checkpoints(where / "old") as checkpoints:
        checkpoints.save(old)
    calls: list[list[str]] = [[]] * ranks
    with Checkpoints(start_from(where, "complete"), keep_last=keep) as checkpoints, interrupt_after() as done:
        checkpoints.save(training)
        checkpoints.wait()
        dist.all_gather_object(calls, done)
    tried, wrong = 0, []
    for victim in range(ranks):
        for after, call in enumerate(calls[victim]):
            if small and call.startswith("write rank-") and after % SMALL_EVERY:
                continue
            tried += 1
            checkpoints = Checkpoints(start_from(where, f"{victim}-{after}"), keep_last=keep)
            training.step = 2
            with in_place() if broken else nullcontext():
                with interrupt_after(after) if rank == victim else nullcontext():
                    checkpoints.save(training)
                    failed = _fails(checkpoints)
                found = _loads(checkpoints, training, states)
            is_there = found is not None and (ranks > 1 or _saves_again(checkpoints, training))
            if not (failed and is_there):
                wrong.append(f"{ranks} ranks, rank {victim}, {call}")
            _restore(training, states[2])
            checkpoints.close()
    return tried, wrong


def start_from(where: Path, name: str) -> Path:
    """A folder with only the old checkpoint, shared by all ranks."""
    if dist.get_rank() == 0:
        shutil.copytree(where / "old" / "step-1", where / name / "step-1")
    dist.barrier()
    return where / name


def _fails(checkpoints: Checkpoints) -> bool:
    try:
        checkpoints.wait()
    except SaveError:
        return True
    return False


def _loads(checkpoints: Checkpoints, training: TrainState, states: dict[int, list[Tensor]]) -> int | None:
    """The loaded step, if all values are those of that step."""
    try:
        step = checkpoints.load(training)
    except Exception:  # any error means that it did not load
        return None
    return step if step in states and same(numbers(training), states[step]) else None


def _saves_again(checkpoints: Checkpoints, training: TrainState) -> bool:
    training.step = 3
    checkpoints.save(training)
    return not _fails(checkpoints)


@torch.no_grad()
def _restore(training: TrainState, state: list[Tensor]) -> None:
    pairs: Any = training.optimizer._pairs  # type: ignore[attr-defined]
    targets = [cast(DTensor, p).to_local() for p in training.model.parameters()]
    states = [training.optimizer.state[shard] for _, shard in pairs]
    targets += [s[kind] for s in states for kind in sorted(s)]
    for target, value in zip(targets, state, strict=True):
        target.copy_(value)


def crash_points(pool: RankPool, folder: Path, small: bool, broken: bool) -> Row:
    file = traced_run.write(folder / "run", sequences=12)
    tried, wrong = 0, []
    for ranks in (1,) if small else (1, 2):
        where = folder / str(ranks)
        count, bad = pool.run(interrupted_saves, ranks, str(file), str(where), small, broken, timeout_s=600)[
            0
        ]
        tried, wrong = tried + count, wrong + bad
    return all_right(
        f"a save is interrupted after each of its {tried} system calls: the old or the new checkpoint loads completely",
        tried,
        wrong,
        f"{DCP}, overwritten in place: loads a mix of two steps, or nothing (measured with torch 2.13, one machine, no Fourfold)",
    )


# -- damaged -----------------------------------------------------------------------------------------------------------


def save_two(file: str, folder: str) -> None:
    ranks = dist.get_world_size()
    with Checkpoints(folder) as checkpoints:
        for count in (1, 2):
            checkpoints.save(trained(Path(file), ranks, count))


def corruptions(pool: RankPool, folder: Path, trials: int, broken: bool) -> Row:
    """Damage every file of a checkpoint; a load has to detect it before it reads values."""
    file = traced_run.write(folder / "run", sequences=12)
    saved, root = folder / "saved", folder / "hit"
    pool.run(save_two, 2, str(file), str(saved))
    files = sorted(path.name for path in (saved / "step-2").iterdir())
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for seed in range(trials):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(saved, root)
        name, kind = hit(root / "step-2", seed)
        counts[kind] += 1
        with patch(f"{__name__}.find_damage", only_sizes) if broken else nullcontext():
            step, damaged = newest(root)
        if step != 1 or not any(name in line for line in damaged.get(2, [])):
            wrong.append(f"{kind} of {name}")
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    return all_right(
        f"{trials} corruptions of the {len(files)} files of a checkpoint ({kinds}): rejected with the name of the "
        "file, and the previous one is used",
        trials,
        wrong,
        f"{DCP}: 4/200 flips refused; safetensors 3/300; torch.load 10/300 (measured with torch 2.13, one machine, no Fourfold)",
    )


def hit(step: Path, seed: int) -> tuple[str, str]:
    """(the file, in which way); one in seven takes another file of the checkpoint in its place."""
    choose = random.Random(f"{seed} another")
    if choose.randrange(7):
        file, way = damage(step, seed)
        return file.name, way
    one, other = choose.sample(sorted(step.iterdir()), 2)
    swap_files(one, other)
    # With the manifest among them there is none: that is what is said.
    names = sorted((one.name, other.name))
    return ("manifest.json" if "manifest.json" in names else names[0]), "swap of files"


def only_sizes(folder: Any, step: int) -> list[str]:
    return find_damage_of_files(folder, step, hashes=False)


find_damage_of_files = find_damage


# -- disk errors -------------------------------------------------------------------------------------------------------


def failing_saves(file: str, folder: str, trials: int, broken: bool) -> list[str]:
    """Failed trials: a save that reported success, or a changed old checkpoint."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    old, training = trained(Path(file), ranks, 1), trained(Path(file), ranks, 2)
    expected, changed = numbers(old), numbers(training)
    wrong = []
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(old)
        checkpoints.wait()
        for trial in range(trials):
            fault = random_error(random.Random(f"{ranks} {trial}"), ranks)
            injected = RankFaults([fault], rank)
            training.step = 2
            with (
                faults_in_files(injected),
                patch.object(Checkpoints, "_save", silent) if broken else nullcontext(),
            ):
                checkpoints.save(training)
                fails = _fails(checkpoints)
            happened = [False] * ranks
            dist.all_gather_object(happened, any(injected.reached.values()))
            if not any(happened):
                wrong.append(f"{fault} did not happen")
            elif not fails:
                wrong.append(f"{fault} was reported as a success")
            if newest(Path(folder))[0] != 1:
                wrong.append(f"{fault} damaged the previous checkpoint")
            if trial == trials - 1:
                if checkpoints.load(training) != 1 or not same(numbers(training), expected):
                    wrong.append(f"{fault} changed the previous checkpoint")
                _restore(training, changed)
                training.step = 2
                checkpoints.save(training)  # the disk works again
                if _fails(checkpoints):
                    wrong.append("a save without a fault failed")
            dist.barrier()
    return wrong


def silent(checkpoints: Checkpoints, step: int, snapshot: Any) -> None:
    """A save whose thread does not report its failure."""
    SAVE(checkpoints, step, snapshot)
    checkpoints._error = None


def random_error(choose: random.Random, ranks: int) -> Fault:
    rank = choose.randrange(ranks)
    files = ["rank-*.safetensors"] * 3 + ([] if rank else ["index.json", "state.json", "manifest.json"])
    name = choose.choice(files)
    action: Action = choose.choice(["eio", "enospc"])
    point: Point = "write" if action == "enospc" else choose.choice(["write", "fsync"])
    # A rank's file is written in many calls, one for each tensor.
    nth = choose.randint(1, 20) if point == "write" and name.startswith("rank") else 1
    return Fault(action, point, rank, name=name, nth=nth)


def disk_errors(pool: RankPool, folder: Path, trials: int, broken: bool) -> Row:
    file = traced_run.write(folder / "run", sequences=12)
    teams = (1, 2, 3, 4) if trials >= 100 else (1, 2)
    done, wrong = 0, []
    for ranks in teams:
        count = trials // len(teams)
        done += count
        wrong += pool.run(
            failing_saves, ranks, str(file), str(folder / str(ranks)), count, broken, timeout_s=600
        )[0]
    return all_right(
        f"EIO or ENOSPC at a random write of {teams[0]} to {teams[-1]} ranks, a thread each: no false success, the "
        "previous checkpoint intact",
        done,
        wrong,
        f"{DCP} with two writer threads: 12/12 false successes (measured with torch 2.13, one machine, no Fourfold)",
    )
