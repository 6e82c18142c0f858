"""Small versions of the benchmark of faults: what it promises holds, and without what protects it does not."""

from pathlib import Path

import pytest

from benchmarks.faults import hostile, kills, numbers, saves
from benchmarks.ranks import RankPool
from fourfold.drill.fault import Fault

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("broken", [False, True])
def test_a_save_cut_short_leaves_the_old_one_or_the_new(pool: RankPool, tmp_path: Path, broken: bool) -> None:
    assert saves.crash_points(pool, tmp_path, small=True, broken=broken).holds != broken


@pytest.mark.parametrize("broken", [False, True])
def test_damage_is_refused_and_the_checkpoint_before_is_taken(
    pool: RankPool, tmp_path: Path, broken: bool
) -> None:
    assert saves.corruptions(pool, tmp_path, 40, broken).holds != broken


@pytest.mark.parametrize("broken", [False, True])
def test_no_error_of_a_disk_is_a_success(pool: RankPool, tmp_path: Path, broken: bool) -> None:
    assert saves.disk_errors(pool, tmp_path, 4 if broken else 8, broken).holds != broken


@pytest.mark.parametrize("broken", [False, True])
def test_hostile_files_run_nothing_reach_nothing_and_take_no_memory(
    pool: RankPool, tmp_path: Path, broken: bool
) -> None:
    for row in hostile.rows(pool, tmp_path, 0 if broken else 60, broken):
        assert row.holds != broken, row


def test_clean_steps_raise_no_alarm(pool: RankPool, tmp_path: Path) -> None:
    assert numbers.clean(pool, tmp_path, 60) == []


@pytest.mark.parametrize(("broken", "within"), [(False, True), (True, False)])
def test_a_flipped_bit_is_named_in_time(pool: RankPool, tmp_path: Path, broken: bool, within: bool) -> None:
    found = numbers.disturbed(pool, tmp_path, (3, 1, 1, 1), "flip", 0, broken)
    assert (found is not None and found <= numbers.WITHIN) == within


def test_random_kills_cover_every_kind_of_point() -> None:
    chosen = [kills.random_kill(seed, 4, 12, [4, 8, 12], 3.0) for seed in range(300)]
    assert [Fault.parse(str(fault)) for fault in chosen] == chosen
    assert {"instant", "step", "forward", "collective", "gradients", "optimizer"} < {f.at for f in chosen}
    assert {"write", "fsync", "rename", "renamed"} < {fault.at for fault in chosen}
    assert {fault.rank for fault in chosen} == {0, 1, 2, 3}
