"""Ranks that share cores, in cases small enough to be worked out by hand."""

import math

import pytest

from fourfold.planner.shared_cores import Flown, Pool, simulate_pool
from fourfold.planner.simulate import simulate
from tests.planner.test_simulate import start, wait, work


def play(shape, cores, *events, per_node=8, slice_s=math.inf, moving=False, slow=(1.0, 1.0)):
    pool = Pool(shape, cores, per_node, slice_s=slice_s)

    def flown(s):
        latency_s, moving_s = (0.0, s.payload_bytes) if moving else (s.payload_bytes, 0.0)
        return Flown(latency_s, moving_s, slow[0], slow[1] if moving else 1.0, 1.0 if moving else slow[1])

    return simulate_pool(events, pool, lambda o: o.flops, flown, start_s=lambda s: 0.0)


def test_ranks_take_turns_on_a_core():
    assert play((8, 1, 1, 1), 2, work(1.0)).step_s == 4
    assert play((8, 1, 1, 1), 2, work(1.0), slice_s=0.1).step_s == pytest.approx(4)
    assert play((8, 1, 1, 1), 8, work(1.0)).step_s == 1


def test_with_a_core_each_all_do_as_one():
    events = (work(1), start(2, "x"), work(1), wait("x"), start(1, "z"), wait("z"), work(0.5))
    one = simulate(events, lambda o: o.flops, lambda s: s.payload_bytes)
    all_of_them = play((1, 2, 1, 2), 4, *events)
    assert all_of_them.step_s == pytest.approx(one.step_s)
    assert all_of_them.exposed_s == pytest.approx(one.exposed_s)


def test_the_wait_of_one_group_hides_behind_the_work_of_another():
    # Two pairs on two cores. One pair works in [0, 1], is sent to in [1, 2], works in [2, 3]; the other a second later.
    events = (work(1.0), start(1.0, "x"), wait("x"), work(1.0))
    step = play((2, 1, 1, 2), 2, *events)
    assert step.step_s == 4  # all ranks at once would have taken 2 + 1 + 2
    assert step.exposed_s["x"] == 1


def test_one_group_has_nothing_to_hide_behind():
    events = (work(1.0), start(1.0, "x"), wait("x"), work(1.0))
    assert play((1, 1, 1, 4), 2, *events).step_s == 5


def test_a_collective_begins_when_the_last_of_its_group_has_started_it():
    step = play((1, 1, 1, 2), 1, work(1.0), start(1.0, "x"), wait("x"))
    assert step.step_s == 3
    assert step.exposed_s["x"] == pytest.approx((2 + 1) / 2)  # the first waits for the other's work, too


def test_a_link_serves_faster_while_other_groups_do_not_use_it():
    # Costs are those of both groups at once. One begins at 1 s and has the link to itself until the other comes.
    events = (work(1.0), start(2.0, "data"), wait("data"))
    both = play((2, 1, 1, 2), 4, *events, per_node=2, moving=True)
    assert both.step_s == 3
    # On one core: ranks 0, 1, 2, 3 are ready at 1, 2, 3, 4 s; (0, 2) sends in [3, 4] at twice the rate.
    apart = play((2, 1, 1, 2), 1, *events, per_node=2, moving=True)
    assert apart.step_s == 5


def test_axes_that_leave_the_node_share_its_link():
    events = (start(1.0, "z"), start(1.0, "data"), wait("z"), wait("data"))
    assert play((2, 2, 1, 1), 4, *events, per_node=1, moving=True).step_s == 2
    # z inside nodes of two, data between them.
    assert play((2, 2, 1, 1), 4, *events, per_node=2, moving=True).step_s == 1


def test_collectives_and_work_slow_each_other_down():
    events = (start(1.0, "x"), work(1.0), wait("x"))
    # Together 1.5 s: all of the work, 0.75 s of the collective.
    for moving in (False, True):
        step = play((1, 1, 1, 2), 2, *events, slow=(1.5, 2.0), moving=moving)
        assert step.step_s == pytest.approx(1.75)
    # With half of the cores at work, by half as much: 1 s does two thirds of the collective, the rest passes alone.
    step = play((1, 1, 1, 2), 4, *events, slow=(1.0, 2.0))
    assert step.step_s == pytest.approx(4 / 3)
