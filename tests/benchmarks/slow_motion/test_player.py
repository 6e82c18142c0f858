"""A stream's clock is exact, whatever the machine does meanwhile, and a ring moves the bytes of its collective."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from benchmarks import cluster
from benchmarks.slow_motion.conductor import Orchestra
from benchmarks.slow_motion.machines import Scale
from benchmarks.slow_motion.player import Links, Player, Ring
from benchmarks.slow_motion.program import COMPUTE, Program
from fourfold.planner.inputs.cluster import preset


def played(program: Program, dilation: float = 1.0) -> float:
    plan = {"programs": {"step": program.streams}, "dilation": dilation, "payload": 1.0}
    return float(Player(plan, 0).play("step", time.perf_counter())["seconds"])


def test_streams_take_exactly_what_their_work_takes():
    program = Program()
    program.work(COMPUTE, 1e-3)
    early = program.record(COMPUTE)
    program.work(COMPUTE, 4e-3)
    program.wait("side", early)
    program.work("side", 2e-3)
    program.wait(COMPUTE, program.record("side"))  # 3 ms, and the compute stream is at 5 ms
    program.work(COMPUTE, 1e-3)
    assert played(program, dilation=2.0) == pytest.approx(12e-3, abs=1e-9)


def test_waiting_takes_until_the_other_stream_is_there():
    program = Program()
    program.work("side", 5e-3)
    program.wait(COMPUTE, program.record("side"))
    program.work(COMPUTE, 1e-3)
    assert played(program) == pytest.approx(6e-3, abs=1e-9)


@pytest.mark.parametrize(("kind", "parts"), [("all_gather", 2), ("reduce_scatter", 2), ("all_reduce", 4)])
def test_a_ring_sends_what_the_formula_says(kind, parts):
    ranks, size = 3, 300_000
    pairs, words = ([socket.socketpair() for _ in range(ranks)] for _ in range(2))
    sent = [0] * ranks

    class Counted(Ring):
        def step(self, size: int) -> None:
            sent[rings.index(self)] += size
            super().step(size)

    rings = [
        Counted(ranks, Links(pairs[rank][0], pairs[rank - 1][1], words[rank - 1][1], words[rank][0]))
        for rank in range(ranks)
    ]
    threads = [threading.Thread(target=ring.run, args=(kind, size)) for ring in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent == [parts * size // ranks] * ranks


@pytest.mark.nightly
@pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
def test_ranks_play_on_links_of_two_rates():
    """Inside a node a collective is faster than between nodes, and computation hides what it hides."""
    whole = preset("dgx-h100")

    programs = {}
    for name, group in (("inside", (1, 2)), ("between", (2, 2))):
        programs[name] = Program()
        programs[name].send(COMPUTE, "all_gather", group, 2e9)
    programs["hidden"] = Program()
    event = programs["hidden"].send(COMPUTE, "all_gather", (1, 2), 2e9)
    programs["hidden"].work(COMPUTE, 0.05)
    programs["hidden"].wait(COMPUTE, event)
    small = replace(whole, links=replace(whole.links, devices_per_node=2, node_gbps=100.0))
    with Orchestra(small, 2, Scale(10, 200), programs) as orchestra:
        found = orchestra.play(2)
    assert found["between"].median_s > 3 * found["inside"].median_s
    assert found["hidden"].median_s == pytest.approx(0.05, rel=0.02)
