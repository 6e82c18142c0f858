"""Ranks killed at random: a small version of the benchmark, and what it would say if something were wrong."""

from pathlib import Path

import pytest

from benchmarks.faults import kills
from benchmarks.ranks import RankPool

pytestmark = pytest.mark.nightly


def test_a_run_whose_ranks_are_killed_ends_as_if_nothing_had_happened(pool: RankPool, tmp_path: Path) -> None:
    """Against ranks that nobody kills, and that no agent has started."""
    shape = kills.GRIDS[0]
    file = kills.write(tmp_path / f"undisturbed-{shape}", shape, 12)
    assert pool.run(kills.rank_main, kills.RANKS, file, 0, 0) == [0] * kills.RANKS
    outcome = kills.disturbed(tmp_path, shape, 12, seed=1, kills=2)
    assert outcome.kills == 2
    # How long it takes is for a machine that does nothing else.
    assert [row.what for row in kills.rows([outcome], "") if not row.holds and "median" not in row.what] == []


def test_what_goes_wrong_is_seen() -> None:
    bad = kills.Outcome(
        2, 4, ["rank-0.safetensors is not that of the undisturbed run"], [21.0, 22.0], [kills.EVERY + 1, 2]
    )
    assert [row.holds for row in kills.rows([bad], "")] == [False, False, False, False]
    good = kills.Outcome(2, 3, [], [2.0, 3.0], [kills.EVERY, 2])
    assert [row.holds for row in kills.rows([good], "")] == [True, True, True, True]
