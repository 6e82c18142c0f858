"""A rank that is dead or stopped is named, with the collective that the others stood in, in time."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults import peers, traced_run
from benchmarks.ranks import RankPool
from fourfold.mesh.axes import AXES, Axis
from fourfold.train.resilience.hang.place import InFlight, Place
from fourfold.train.resilience.hang.summary import find_missing, group_of, summarise

# -- who is it? --------------------------------------------------------------------------------------------------------

SHAPE = (1, 2, 2, 2)
NOW_S = 1000.0


def place(
    rank: int, *waits: tuple[Axis, int], doing: str = "forward and backward", ago_s: float = 0.0
) -> Place:
    """A rank that has begun 10 collectives on each axis, or as many as it waits in."""
    counts = dict.fromkeys(AXES, 10) | dict(waits)
    flights = tuple(InFlight(axis, number, f"{axis} all-reduce of it", 5.0) for axis, number in waits)
    return Place(rank, "host", 100 + rank, 418, doing, NOW_S - ago_s, counts, flights)


def missing(reports: Sequence[Place], seen: Sequence[Place] = ()) -> list[int]:
    by_rank, others = {p.rank: p for p in reports}, {p.rank: p for p in seen}
    found = find_missing(by_rank, others, SHAPE, now_s=NOW_S, stale_s=2.0)
    return [m.rank for m in found]


def test_the_groups_of_an_axis() -> None:
    assert [group_of(r, "y", SHAPE) for r in (0, 2, 5)] == [[0, 2], [0, 2], [5, 7]]
    assert group_of(3, "data", (2, 1, 1, 3)) == [0, 3]


def test_a_chain_of_waits_leads_to_the_rank_at_its_end() -> None:
    # 5 is stopped in the midst of something; 4 meets it on x, 1 on z, and 0 waits for 1, or 4.
    reports = [
        place(4, ("x", 11)),
        place(1, ("z", 11)),
        place(0, ("x", 12)),
        place(7, ("y", 13)),
        place(6, ("z", 11)),
    ]
    seen = [place(5, doing="the optimizer", ago_s=6.0), place(2, ("z", 11)), place(3, ("y", 12))]
    assert missing(reports, seen) == [5]


def test_two_that_are_stopped_are_both_named() -> None:
    reports = [place(r, ("x", 11)) for r in (0, 2, 4, 6)]
    seen = [place(1, ago_s=9.0), place(5, ago_s=9.0), place(3, ("y", 10)), place(7, ("y", 10))]
    assert missing(reports, seen) == [1, 5]


def test_who_lives_but_does_not_come_is_behind() -> None:
    reports = [place(0, ("x", 11))]
    assert missing(reports, [place(1, doing="data")]) == [1]
    # It has come to the collective: then it is not the one.
    assert missing(reports, [place(1, ("x", 11))]) == []


def test_who_fails_by_itself_is_the_cause_of_all() -> None:
    reports = [
        replace(place(0, ("x", 11)), error="RuntimeError: Connection closed by peer"),
        replace(place(1), error="ValueError: shard 3 is gone"),
        replace(place(3, ("y", 11)), error="RuntimeError: Connection closed by peer"),
    ]
    assert missing(reports) == [1]
    by_rank = {p.rank: p for p in reports}
    found = find_missing(by_rank, {}, SHAPE, now_s=NOW_S, stale_s=2.0)
    assert summarise(found, by_rank, now_s=NOW_S).startswith(
        "step 418: rank 1 failed; rank 1 on host (process 101): ValueError: shard 3 is gone"
    )


def test_who_is_lost_in_a_save_is_who_says_nothing() -> None:
    reports = [
        replace(place(r, doing="checkpoint"), error="SaveError: Connection closed by peer")
        for r in range(8)
        if r != 6
    ]
    assert missing(reports, [place(6, doing="checkpoint")]) == [6]
    # Most have not said anything: nobody is blamed.
    assert missing(reports[:3], []) == []


def test_the_sentence_names_collective_step_ranks_and_where_they_were() -> None:
    reports = {0: place(0, ("x", 11))}
    found = find_missing(
        reports, {1: place(1, doing="the optimizer", ago_s=7.0)}, SHAPE, now_s=NOW_S, stale_s=2.0
    )
    assert summarise(found, reports, now_s=NOW_S).splitlines()[0] == (
        "x all-reduce of it, step 418: rank 1 never arrived; rank 1 on host (process 101): last seen in the optimizer, "
        "step 418, 7.0 s ago"
    )


# -- for real ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_stopped_rank_is_named_with_the_collective_that_it_did_not_come_to(
    pool: RankPool, tmp_path: Path
) -> None:
    """One of the trials of `benchmarks.faults`, which also holds the time to a second; here others may have the cores."""
    file = traced_run.write(tmp_path / "run")
    number = next(n for n in itertools.count() if peers.drawn("stop", n)[1].at == "forward")
    shape, fault = peers.drawn("stop", number)
    sequences = {shape: pool.run(peers.collective_order, 4, str(file), shape)}
    seen = peers.trial(pool, file, tmp_path / "hung", "stop", number, sequences)
    assert seen.wrong == ""
    assert seen.longest_s < peers.GIVE_UP_S
    for rank in set(range(4)) - {fault.rank}:
        report = json.loads((tmp_path / f"hung/hang/rank-{rank}.json").read_text())
        assert report["step"] in (fault.step, fault.step + 1)
        assert report["stack"]
    # What was named could have been wrong.
    words = (tmp_path / "hung/hang/summary.txt").read_text()
    for wrong in (
        words.replace(f"rank {fault.rank} never", "rank 9 never"),
        re.sub(" of | for ", " of x.", words, count=1),
    ):
        (tmp_path / "hung/hang/summary.txt").write_text(wrong)
        assert "the report says" in peers.wrong_with(tmp_path / "hung", fault, shape, sequences[shape])


@pytest.mark.nightly
def test_when_a_rank_is_killed_the_others_leave_at_once(pool: RankPool, tmp_path: Path) -> None:
    file = traced_run.write(tmp_path / "run")
    _, fault = peers.drawn("kill", 0)
    # Before anything times out; the benchmark holds it to a second.
    assert peers.trial(pool, file, tmp_path / "dead", "kill", 0, {}).longest_s < peers.TIMEOUT_S
    assert f"rank {fault.rank} never arrived" in (tmp_path / "dead/hang/summary.txt").read_text()
