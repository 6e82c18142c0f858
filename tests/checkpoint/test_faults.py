"""Checkpoints under faults: killed ranks, damaged files, full disks, injected code."""

import ast
import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fourfold.checkpoint
from benchmarks.faults.damage import swap_files
from benchmarks.ranks import RankError, RankPool
from fourfold.checkpoint import Checkpoints, SaveError, commit, storage
from fourfold.checkpoint.commit import newest_valid, steps
from fourfold.checkpoint.folder import Folder, open_folder
from fourfold.checkpoint.manifest import CorruptCheckpointError, find_damage
from fourfold.checkpoint.storage import Reader
from fourfold.cli.main import main
from fourfold.drill.drill import flip_bit
from fourfold.drill.fault import Fault, Point
from fourfold.drill.injector import RankFaults, faults_in_files
from tests.checkpoints import advance, assert_same, numbers, save_steps, start

# -- kill -9 -----------------------------------------------------------------------------------------------------------

# In processes that are really killed; `benchmarks.faults` ends a save after each of its system calls, damages files in
# every way and lets every kind of write fail, and `test_faults.py` has its small version.
KILLS = [
    (1, "write", "rank-1.safetensors"),
    (0, "renamed", "step-2.tmp"),
]


def save_and_be_killed(folder: str, victim: int, point: Point, name: str) -> None:
    training = start((1, 2, 1, 1))
    training.step = 1
    checkpoints = Checkpoints(folder)
    checkpoints.save(training)
    checkpoints.wait()
    training.step = 2
    faults = RankFaults([Fault("kill", point, victim, name=name)], torch.distributed.get_rank())
    with faults_in_files(faults):
        checkpoints.save(training)
        checkpoints.wait()


def find_newest(folder: Path) -> int | None:
    root = open_folder(folder)
    return newest_valid(steps(root), lambda s: find_damage(root.child(commit.step_name(s)), s))[0]


@pytest.mark.parametrize(("victim", "point", "name"), KILLS)
def test_a_rank_killed_during_a_save_leaves_the_previous_checkpoint(
    pool: RankPool, tmp_path: Path, victim: int, point: Point, name: str
) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        pool.run(save_and_be_killed, 2, str(tmp_path), victim, point, name)
    assert find_newest(tmp_path) == (2 if point == "renamed" else 1)
    if point != "renamed":
        assert (tmp_path / "step-2.tmp").exists()  # it was killed in the midst of it


def resume_after_a_kill(folder: str) -> None:
    training, untouched = start(), start()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(training) == 1
        assert_same(numbers(training), numbers(untouched))
        advance(training)
        checkpoints.save(training)
    assert training.step == 2


def test_a_run_resumes_after_a_kill_and_saves_the_same_step_again(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        pool.run(save_and_be_killed, 2, str(tmp_path), 0, "fsync", "manifest.json")
    pool.run(resume_after_a_kill, 1, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]
    assert find_newest(tmp_path) == 2


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two steps, of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save_steps, 2, str(folder), (1, 2, 1, 1), 2)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(file: Path, seed: int) -> None:
    flip_bit(file, random.Random(seed))


FILES = ("rank-0.safetensors", "rank-1.safetensors", "index.json", "state.json", "manifest.json")
DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda f: f.write_bytes(f.read_bytes()[:-1]),
    "halved": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
    "empty": lambda f: f.write_bytes(b""),
    "longer": lambda f: f.write_bytes(f.read_bytes() + b"\0"),
    "zeroed": lambda f: f.write_bytes(bytes(f.stat().st_size)),
    "from another step": lambda f: swap_files(f, f.parent.parent / "step-1" / f.name),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    # The index says where the numbers are, not which: it is the same at all steps of a run.
    [(n, d) for n in FILES for d in DAMAGES if (n, d) != ("index.json", "from another step")],
)
def test_a_damaged_file_is_named_and_the_step_before_is_the_newest(run: Path, name: str, damage: str) -> None:
    DAMAGES[damage](run / "step-2" / name)
    found = find_damage(open_folder(run / "step-2"), 2)
    if damage == "from another step" and name == "manifest.json":
        assert found  # of the other step
    else:
        assert [name in line for line in found] == [True]
    assert find_newest(run) == (None if damage == "from another step" else 1)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_step_before_is_the_newest(run: Path, name: str) -> None:
    (run / "step-2" / name).unlink()
    (line,) = find_damage(open_folder(run / "step-2"), 2)
    assert name in line
    assert "missing" in line
    assert find_newest(run) == 1


def test_files_of_two_ranks_are_not_mistaken_for_each_other(run: Path) -> None:
    swap_files(run / "step-2" / FILES[0], run / "step-2" / FILES[1])
    assert len(find_damage(open_folder(run / "step-2"), 2)) == 2


def test_a_checkpoint_under_another_step_is_rejected(run: Path) -> None:
    (run / "step-2").rename(run / "step-3")
    (line,) = find_damage(open_folder(run / "step-3"), 3)
    assert "is of step 2" in line


def fall_back(folder: str, name: str) -> None:
    training = start((1, 1, 1, 2))
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(ValueError, match=name):
            checkpoints.load(training, step=2)
        assert checkpoints.load(training) == 1
        advance(training)
        checkpoints.save(training)


@pytest.mark.parametrize("name", ["rank-1.safetensors", "manifest.json"])
def test_a_run_falls_back_one_step_and_saves_the_damaged_one_again(
    pool: RankPool, run: Path, name: str
) -> None:
    flip(run / "step-2" / "rank-1.safetensors", 12345)
    if name == "manifest.json":
        (run / "step-2" / name).unlink()
    pool.run(fall_back, 2, str(run), name)
    assert sorted(p.name for p in run.iterdir()) == ["step-1", "step-2", "step-2.damaged-0"]
    assert find_newest(run) == 2


def load_ruins(folder: str) -> str:
    with pytest.raises(ValueError, match="none of the 2") as caught:
        Checkpoints(folder).load(start())
    return str(caught.value)


def test_a_run_does_not_start_over_when_all_checkpoints_are_damaged(pool: RankPool, run: Path) -> None:
    for step in ("step-1", "step-2"):
        flip(run / step / "state.json", 99)
    (message,) = pool.run(load_ruins, 1, str(run))
    assert "state.json" in message


def spoil_the_newest(folder: str) -> str:
    plain = commit.commit

    def spoiling(root: Folder, step: int, *rest: object) -> None:
        plain(root, step, *rest)  # type: ignore[arg-type]
        flip(Path(folder, commit.step_name(step), "rank-0.safetensors"), 4321)

    training = start((1, 2, 1, 1))
    with Checkpoints(folder, keep_last=1) as checkpoints:
        training.step = 1
        checkpoints.save(training)
        checkpoints.wait()
        commit.commit = spoiling
        try:
            training.step = 2
            checkpoints.save(training)
            with pytest.raises(SaveError, match=r"rank-0\.safetensors") as caught:
                checkpoints.wait()
        finally:
            commit.commit = plain
    return str(caught.value)


def test_the_last_valid_checkpoint_is_not_removed_for_a_damaged_one(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(spoil_the_newest, 2, str(tmp_path)):
        assert "step-1" in message
    assert find_newest(tmp_path) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["pieces"][0].update(file="../../etc/passwd"),
        lambda t: t["pieces"][0].update(file="unknown.safetensors"),
        lambda t: t["pieces"][0].update(bytes=[0, 10**18]),
        lambda t: t["pieces"][0].update(bytes=[-8, 0]),
        lambda t: t["pieces"][0].update(offset=[10**12] * len(t["shape"])),
        lambda t: t["pieces"].pop(),
        lambda t: t.update(dtype="OBJECT"),
        lambda t: t.update(shape="all"),
        lambda t: t.clear(),
    ],
)
def test_a_wrong_index_is_rejected(run: Path, change: Callable[[dict[str, object]], None]) -> None:
    file = run / "step-2" / "index.json"
    index = json.loads(file.read_text())
    change(index["tensors"]["model.lm_head.weight"])
    file.write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match=r"model\.lm_head\.weight"):
        Reader(open_folder(run), 2)


# -- disks -------------------------------------------------------------------------------------------------------------


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_the_disk(folder: str, size: int) -> str:
    training = start((1, 2, 1, 1))
    advance(training)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)
        checkpoints.wait()
        expected = numbers(training)
        advance(training)
        with files_no_longer_than(size if torch.distributed.get_rank() == 1 else 10**9):
            checkpoints.save(training)
            with pytest.raises(SaveError) as caught:
                checkpoints.save(training)  # the next call tells
        assert checkpoints.load(training) == 1
        assert_same(numbers(training), expected)
        advance(training)
        checkpoints.save(training)  # there is room again
    return str(caught.value)


@pytest.mark.parametrize("size", [0, 20_000])
def test_a_full_disk_of_one_rank_is_an_error_on_all(pool: RankPool, tmp_path: Path, size: int) -> None:
    for message in pool.run(fill_the_disk, 2, str(tmp_path), size):
        assert all(
            word in message for word in ("step-2", "rank 1", "rank-1.safetensors", f"after {size} bytes")
        )
        assert "rank 0" not in message
    assert steps(open_folder(tmp_path)) == [1, 2]


def not_shared(folder: str) -> str:
    rank = torch.distributed.get_rank()
    training = start((1, 2, 1, 1))
    checkpoints = Checkpoints(f"{folder}/host-{rank}")
    checkpoints.root.child("step-0.tmp").make()
    checkpoints.save(training)
    with pytest.raises(SaveError) as caught:
        checkpoints.wait()
    return str(caught.value)


def test_folders_that_hosts_do_not_share_are_detected(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(not_shared, 2, str(tmp_path)):
        assert "rank-1.safetensors" in message
        assert "share" in message


# -- planted code ------------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def load_anyway(folder: str) -> int | None:
    return Checkpoints(folder).load(start())


@pytest.mark.parametrize("name", [*FILES, ".metadata", "evil.pkl", "rank-2.safetensors", "__0_0.distcp"])
def test_planted_pickle_is_never_executed(pool: RankPool, run: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    (run / "step-2" / name).write_bytes(pickle.dumps(Bomb(marker)))
    (loaded,) = pool.run(load_anyway, 1, str(run))
    assert loaded == (1 if name in FILES else 2)
    for action in ("ls", "verify", "info"):
        main(["checkpoint", action, str(run)])
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()  # it would have gone off


def test_the_checkpoint_code_uses_nothing_that_executes_files() -> None:
    (folder,) = fourfold.checkpoint.__path__
    banned_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    banned_calls = {"eval", "exec", "__import__", "compile"}
    for file in Path(folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} | {getattr(node, "module", None) or ""}
                assert not {n.split(".")[0] for n in names} & banned_modules, file.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load")}, file.name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in banned_calls, file.name


def test_reading_needs_no_unpickler(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert find_newest(run) == 2
    reader = Reader(open_folder(run), 2)
    for name in reader.metadata.state_dict_metadata:
        assert list(storage.read_rows(reader, name))
