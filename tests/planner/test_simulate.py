"""Steps small enough to be worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.dry_run.events import Operation, Start, Wait
from fourfold.planner.simulate import simulate


def work(seconds: float, phase: str = "forward") -> Operation:
    return Operation(phase, "layer", "aten.mm.default", "matmul", seconds, 0, (1, 1, 1, 1))


def start(seconds: float, axis: str = "z", module: str = "w") -> Start:
    return Start("forward", module, axis, "all_gather", "weight", 2, seconds)


def wait(axis: str = "z", module: str = "w") -> Wait:
    return Wait("forward", module, axis, "all_gather", "weight")


def simulated(*events, **factors):
    """Each axis has a link of its own, and nothing slows down, unless ``factors`` say otherwise."""
    alone = {
        "link_of": lambda s: s.axis,
        "slow_down": lambda s: (1.0, 1.0),
        "keep_spans": False,
    }
    return simulate(events, lambda o: o.flops, lambda s: s.payload_bytes, **alone | factors)


def test_what_is_waited_for_at_once_is_exposed():
    step = simulated(work(1), start(2), wait(), work(1))
    assert (step.step_s, step.compute_s, step.link_s["z"], step.exposed_s["z"]) == (4, 2, 2, 2)


def test_what_computation_covers_is_not():
    step = simulated(start(2), work(3), wait(), work(1))
    assert (step.step_s, step.link_s["z"], step.exposed_s.get("z", 0)) == (4, 2, 0)


def test_an_axis_does_one_thing_at_a_time_and_axes_do_not_wait_for_each_other():
    step = simulated(start(2, module="a"), start(2, module="b"), start(3, "x"), wait("x"), wait("z", "b"))
    assert step.exposed_s == {"x": 3, "z": 1}
    assert step.step_s == 4


def test_equal_words_are_waited_for_in_the_order_of_their_start():
    step = simulated(start(1), start(5), wait(), work(1), wait())
    assert step.step_s == 6
    assert step.exposed_s["z"] == 1 + 4


def test_work_slows_down_only_while_something_is_in_flight():
    step = simulated(start(3), work(4), wait(), slow_down=lambda s: (1.5, 1.0))
    # 3 s in flight do 2 s of the work; the other 2 s run alone.
    assert step.step_s == pytest.approx(5)


def test_nothing_ends_before_its_last_collective():
    assert simulated(work(1), start(5)).step_s == 6


def test_two_axes_on_one_link_share_it():
    # Alone they take 2 and 3 s. Half a rate each for 4 s; x has 1 s left, alone again.
    both = (start(2, "z"), start(3, "x"), wait("z"), wait("x"))
    step = simulated(*both, link_of=lambda s: "between nodes")
    assert (step.step_s, step.exposed_s) == (5, {"z": 4, "x": 1})
    assert step.link_s == {"z": 2, "x": 3}  # what each would take alone
    assert simulated(*both).step_s == 3  # with a link each


def test_a_link_is_shared_only_while_both_are_under_way():
    # x has the link to itself for 1 s, then half of it for 2 s until z's 1 s are done, then 1 s is left.
    step = simulated(start(3, "x"), work(1), start(1, "z"), wait("z"), wait("x"), link_of=lambda s: "one")
    assert step.step_s == 4
    assert step.exposed_s == {"z": 2, "x": 1}


def test_what_waits_in_its_axis_takes_no_part_of_the_link():
    # Half a rate each for the first of z and for x, 2 s; then the second of z has the link to itself.
    events = (start(1, "z", "a"), start(1, "z", "b"), start(1, "x"), wait("x"), wait("z", "b"))
    step = simulated(*events, link_of=lambda s: "one")
    assert step.exposed_s == {"x": 2, "z": 1}
    assert step.step_s == 3


def test_other_links_are_not_shared():
    events = (start(2, "x"), start(2, "z"), start(2, "data"), wait("z"), wait("data"), wait("x"))
    step = simulated(*events, link_of=lambda s: "inside" if s.axis == "x" else "between")
    assert step.step_s == 4
    assert step.exposed_s == {"z": 4}  # data is done at the same time, x long before


def test_collectives_slow_down_only_while_there_is_work():
    # 2 s of work let 1 s of the collective pass at half its rate; the other 2 s pass while it is waited for.
    step = simulated(start(3), work(2), wait(), slow_down=lambda s: (1.0, 2.0))
    assert (step.step_s, step.exposed_s["z"], step.link_s["z"]) == (4, 2, 3)


def test_both_slow_down():
    # Together: 1.5 s do 1 s of the work and 0.75 s of the collective; 0.25 s of the latter are left.
    step = simulated(start(1), work(1), wait(), slow_down=lambda s: (1.5, 2.0))
    assert step.step_s == pytest.approx(1.75)
    assert step.compute_s == pytest.approx(1.5)


def test_two_in_flight_take_more_of_the_processor_than_one():
    # Each leaves two thirds of it, both together one third: 4 s do 4/3 s of the work, the rest passes alone.
    step = simulated(
        start(4, "z"), start(4, "x"), work(2), wait("z"), wait("x"), slow_down=lambda s: (1.5, 1.0)
    )
    assert step.step_s == pytest.approx(4 + 2 / 3)
    # On one link each goes on at half its rate and takes half of that: for 3 s together they take a third.
    shared = {"link_of": lambda s: "one", "slow_down": lambda s: (1.5, 1.0)}
    assert simulated(start(2, "z"), start(2, "x"), work(2), **shared).compute_s == pytest.approx(3)


def test_spans_tell_when_each_was_under_way():
    step = simulated(start(1, "z", "a"), start(1, "z", "b"), work(3), wait("z", "b"), keep_spans=True)
    found = {(s.track, s.name): (s.start_s, s.end_s) for s in step.spans}
    assert found["z", "all_gather a"] == (0, 1)
    assert found["z", "all_gather b"] == (1, 2)
    assert found["compute", "aten.mm.default layer"] == (0, 3)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["x", "y", "z"]), st.integers(0, 5), st.integers(0, 5)), max_size=12)
)
def test_one_link_is_never_idle_with_something_in_flight(parts):
    """Sharing moves who is first; all together take as long as one after the other."""
    starts = [start(seconds, axis, str(i)) for i, (axis, seconds, _) in enumerate(parts)]
    step = simulated(*starts, link_of=lambda s: "one")
    assert step.step_s == pytest.approx(sum(seconds for _, seconds, _ in parts))
    # And no more is exposed than is in flight, whatever computation lies between.
    events = [e for s, (_, _, w) in zip(starts, parts, strict=True) for e in (s, work(w))]
    waits = [wait(axis, str(i)) for i, (axis, _, _) in enumerate(parts)]
    step = simulated(*events, *waits, link_of=lambda s: "one")
    assert sum(step.exposed_s.values()) <= sum(step.link_s.values()) + 1e-9
    assert step.step_s == pytest.approx(step.compute_s + sum(step.exposed_s.values()))


def test_what_follows_another_axis_begins_when_that_is_done_and_holds_up_nobody():
    after = Start("backward", "w", "data", "all_reduce", "gradient", 2, 1, follows="z")
    step = simulated(start(2), after, work(2.5), keep_spans=True)
    found = {s.track: (s.start_s, s.end_s) for s in step.spans}
    assert found == {"compute": (0, 2.5), "z": (0, 2), "data": (2, 3)}
    assert step.step_s == 3
    alone = simulated(Start("backward", "w", "data", "all_reduce", "gradient", 2, 1, follows="z"), work(0.5))
    assert alone.step_s == 1
