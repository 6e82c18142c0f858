"""A rank that is dead or stopped is named in time, with the collective in which the others wait."""

import itertools
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from benchmarks.faults import peers, traced_run
from benchmarks.ranks import RankPool
from fourfold.mesh.axes import AXES, Axis
from fourfold.mesh.collectives import InFlightCollective
from fourfold.train.resilience.hang.monitor import Monitor
from fourfold.train.resilience.hang.status import CollectiveTracker, InFlight, RankStatus
from fourfold.train.resilience.hang.summary import axis_group, find_missing, summarise

# -- which rank? --------------------------------------------------------------------------------------------------------

SHAPE = (1, 2, 2, 2)


def status(
    rank: int, *waits: tuple[Axis, int], doing: str = "forward and backward", age_s: float = 0.0
) -> RankStatus:
    """A rank that has started 10 collectives on each axis, or as many as it waits in."""
    counts = dict.fromkeys(AXES, 10) | dict(waits)
    flights = tuple(InFlight(axis, number, f"{axis} all-reduce of it", 5.0) for axis, number in waits)
    return RankStatus(rank, "host", 100 + rank, 418, doing, counts, flights, age_s=age_s)


def missing(reports: Sequence[RankStatus], heartbeats: Sequence[RankStatus] = ()) -> list[int]:
    by_rank, others = {p.rank: p for p in reports}, {p.rank: p for p in heartbeats}
    found = find_missing(by_rank, others, SHAPE, stale_s=2.0)
    return [m.rank for m in found]


def test_groups_of_an_axis() -> None:
    assert [axis_group(r, "y", SHAPE) for r in (0, 2, 5)] == [[0, 2], [0, 2], [5, 7]]
    assert axis_group(3, "data", (2, 1, 1, 3)) == [0, 3]


def test_a_chain_of_waits_leads_to_the_rank_at_its_end() -> None:
    # 5 is stopped; 4 waits for it on x, 1 on z, and 0 waits for 1 or 4.
    reports = [
        status(4, ("x", 11)),
        status(1, ("z", 11)),
        status(0, ("x", 12)),
        status(7, ("y", 13)),
        status(6, ("z", 11)),
    ]
    heartbeats = [status(5, doing="the optimizer", age_s=6.0), status(2, ("z", 11)), status(3, ("y", 12))]
    assert missing(reports, heartbeats) == [5]


def test_two_stopped_ranks_are_both_named() -> None:
    reports = [status(r, ("x", 11)) for r in (0, 2, 4, 6)]
    heartbeats = [status(1, age_s=9.0), status(5, age_s=9.0), status(3, ("y", 10)), status(7, ("y", 10))]
    assert missing(reports, heartbeats) == [1, 5]


def test_ranks_that_share_sequences_wait_for_each_other_alone() -> None:
    reports = {0: status(0, ("sequence", 11))}
    heartbeats = {r: status(r, doing="data") for r in range(1, 8)}
    found = find_missing(reports, heartbeats, (1, 8, 1, 1), stale_s=5.0, sequence_ranks=2)
    assert [m.rank for m in found] == [1]


def test_a_live_rank_that_does_not_arrive_is_named() -> None:
    reports = [status(0, ("x", 11))]
    assert missing(reports, [status(1, doing="data")]) == [1]
    # It has arrived at the collective: then it is not missing.
    assert missing(reports, [status(1, ("x", 11))]) == []


def test_a_rank_with_an_error_of_its_own_is_the_cause() -> None:
    reports = [
        replace(status(0, ("x", 11)), error="RuntimeError: Connection closed by peer"),
        replace(status(1), error="ValueError: shard 3 is gone"),
        replace(status(3, ("y", 11)), error="RuntimeError: Connection closed by peer"),
    ]
    assert missing(reports) == [1]
    by_rank = {p.rank: p for p in reports}
    found = find_missing(by_rank, {}, SHAPE, stale_s=2.0)
    assert summarise(found, by_rank).startswith(
        "step 418: rank 1 failed; rank 1 on host (process 101): ValueError: shard 3 is gone"
    )


def test_a_rank_lost_in_a_save_is_the_one_without_a_report() -> None:
    reports = [
        replace(status(r, doing="checkpoint"), error="SaveError: Connection closed by peer")
        for r in range(8)
        if r != 6
    ]
    assert missing(reports, [status(6, doing="checkpoint")]) == [6]
    # Most ranks have not reported: none is named.
    assert missing(reports[:3], []) == []


def test_the_summary_names_collective_step_rank_and_its_last_status() -> None:
    reports = {0: status(0, ("x", 11))}
    last = status(1, doing="the optimizer", age_s=7.0)
    found = find_missing(reports, {1: last}, SHAPE, stale_s=2.0)
    assert summarise(found, reports).splitlines()[0] == (
        "x all-reduce of it, step 418: rank 1 never arrived; rank 1 on host (process 101): last seen in the optimizer, "
        "step 418, 7.0 s ago"
    )


# -- on ranks ----------------------------------------------------------------------------------------------------------


class NeverDone:
    """The work of a collective at which a peer does not arrive."""

    def is_completed(self) -> bool:
        return False


def judge_with_a_skewed_clock(folder: str) -> str:
    """Ranks 0 and 1 wait for rank 2, whose heartbeats stop; the clock of rank 1 is an hour behind."""
    rank, now_s = dist.get_rank(), time.time
    summary = Path(folder) / "summary.txt"
    tracker = CollectiveTracker(rank, lambda: (5, "forward and backward"), host_waits=True)
    monitor = Monitor(tracker, (1, 1, 1, 3), Path(folder), threading.get_ident(), ends_process=False)
    if rank < 2:
        work: Any = NeverDone()
        tracker.started(InFlightCollective("x", "all_reduce", "loss", "", 4, time.time_ns(), work=work))
    monitor.timeout_s = 4.0 if rank == 0 else float("inf")
    with patch("time.time", lambda: now_s() - 3600 * (rank == 1)):
        monitor.start()
        if rank == 2:
            time.sleep(1.0)
            monitor.stop()
        deadline_s = time.monotonic() + 60
        while not (summary.exists() and summary.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        monitor.stop()
    return summary.read_text()


@pytest.mark.nightly
def test_a_live_rank_is_not_named_because_of_its_clock(pool: RankPool, tmp_path: Path) -> None:
    for summary in pool.run(judge_with_a_skewed_clock, 3, str(tmp_path)):
        assert summary.startswith("x all-reduce for loss, step 5: rank 2 never arrived")


@pytest.mark.nightly
def test_a_stopped_rank_is_named_with_the_collective_at_which_it_did_not_arrive(
    pool: RankPool, tmp_path: Path
) -> None:
    """One of the trials of `benchmarks.faults`, which also bounds the time to a second; here the cores may be busy."""
    file = traced_run.write(tmp_path / "run")
    number = next(n for n in itertools.count() if peers.random_fault("stop", n)[1].at == "forward")
    shape, fault = peers.random_fault("stop", number)
    sequences = {shape: pool.run(peers.collective_order, 4, str(file), shape)}
    seen = peers.trial(pool, file, tmp_path / "hung", "stop", number, sequences)
    assert seen.wrong == ""
    assert seen.longest_s < peers.GIVE_UP_S
    for rank in set(range(4)) - {fault.rank}:
        report = json.loads((tmp_path / f"hung/hang/rank-{rank}.json").read_text())
        assert report["step"] in (fault.step, fault.step + 1)
        assert report["stack"]
    # The check would find a wrong name.
    words = (tmp_path / "hung/hang/summary.txt").read_text()
    for wrong in (
        words.replace(f"rank {fault.rank} never", "rank 9 never"),
        re.sub(" of | for ", " of x.", words, count=1),
    ):
        (tmp_path / "hung/hang/summary.txt").write_text(wrong)
        assert "the report says" in peers.wrong_with(tmp_path / "hung", fault, shape, sequences[shape])


@pytest.mark.nightly
def test_when_a_rank_is_killed_the_others_exit_at_once(pool: RankPool, tmp_path: Path) -> None:
    file = traced_run.write(tmp_path / "run")
    _, fault = peers.random_fault("kill", 0)
    # Before any timeout; the benchmark bounds it to a second.
    assert peers.trial(pool, file, tmp_path / "dead", "kill", 0, {}).longest_s < peers.TIMEOUT_S
    assert f"rank {fault.rank} never arrived" in (tmp_path / "dead/hang/summary.txt").read_text()
