"""A rank that is dead or stopped is named, with the collective that the others stood in, in time."""

import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fourfold import RankPool
from fourfold.faults.fault import Fault
from fourfold.faults.injector import Injector
from fourfold.grid import AXES, Axis, Grid
from fourfold.ranks import RankError
from fourfold.train.hang import HangWatch, LostRanks
from fourfold.train.hang.place import InFlight, Place
from fourfold.train.hang.summary import find_missing, group_of, summarise
from fourfold.train.trainer import Callback, StepResult, Trainer
from tests.training import on, write_run

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

TIMEOUT_S = 3.0


class Pace(Callback):
    """Steps long enough for signs of life between them."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        time.sleep(0.05)


def train_until_lost(values: dict[str, Any], shape: Any, faults: Sequence[Fault], folder: str) -> None:
    run = on(values, shape, schedule={"steps": 40})
    where = Path(folder)
    watch = HangWatch(TIMEOUT_S, 30.0, where / "hang")
    trainer = Trainer(run, Grid.create(shape), [watch, Injector(faults, spent=where / "spent"), Pace()])
    (where / f"process-{dist.get_rank()}").write_text(str(os.getpid()))
    try:
        trainer.train()
    except LostRanks:
        os._exit(1)  # as a run does


def ends_of(folder: Path, ranks: Sequence[int]) -> dict[int, float]:
    """When the processes of these ranks ended."""
    found: dict[int, float] = {}
    while len(found) < len(ranks):
        time.sleep(0.01)
        for rank in ranks:
            file = folder / f"process-{rank}"
            if rank not in found and file.exists() and (text := file.read_text()):
                status = Path(f"/proc/{text}/stat")
                if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                    found[rank] = time.time()
    return found


@pytest.mark.parametrize(
    ("shape", "fault", "collectives"),
    [
        (
            (1, 2, 1, 2),
            "stop:at=forward,rank=3,step=4,name=model.layers.1.mlp.down_proj",
            # The other half of the batch: that one was under way when the rank was stopped, or had just ended.
            ("model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"),
        ),
        ((1, 2, 1, 1), "kill:at=collective,rank=1,step=4,name=z all_gather *", ("z all-",)),
    ],
)
def test_all_ranks_leave_in_time_and_name_the_one(
    pool: RankPool, tmp_path: Path, shape: tuple[int, ...], fault: str, collectives: Sequence[str]
) -> None:
    planted = Fault.parse(fault)
    values = write_run(tmp_path)
    ranks = math.prod(shape)
    others = [rank for rank in range(ranks) if rank != planted.rank]
    with ThreadPoolExecutor() as beside:
        ends = beside.submit(ends_of, tmp_path, others)
        with pytest.raises(RankError):
            pool.run(train_until_lost, ranks, values, shape, [planted], str(tmp_path))
    (spent,) = (tmp_path / "spent").iterdir()
    took_s = {rank: end_s - spent.stat().st_mtime for rank, end_s in ends.result().items()}
    # `benchmarks.faults` holds it to a second; here others may have the cores.
    assert max(took_s.values()) < 15.0 + (TIMEOUT_S if planted.action == "stop" else 0.0), took_s
    for rank in others:
        report = json.loads((tmp_path / f"hang/rank-{rank}.json").read_text())
        assert report["step"] in (4, 5)
        assert report["stack"]
    summary = (tmp_path / "hang/summary.txt").read_text()
    first = summary.splitlines()[0]
    assert f"rank {planted.rank} never arrived" in first, summary
    assert any(collective in first for collective in collectives), first
