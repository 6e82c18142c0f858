"""FSDP2's collectives in the order that CUDA's streams give them."""

import pytest
from transformers import LlamaConfig

from fourfold.dry_run.events import Operation, Start, Wait
from fourfold.dry_run.run import dryrun
from fourfold.dry_run.streams import on_streams


@pytest.fixture(scope="module")
def events():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    done = dryrun(config, (2, 2, 1, 2), sequences=8, length=32, micro_batches=2, weights="fsdp2")
    return done.trace.events


def words(event):
    return (event.axis, event.kind, event.purpose, event.module)


def test_no_event_is_lost_and_no_wait_comes_before_its_start(events):
    moved = on_streams(events)
    assert len(moved) == len(events)
    assert [e for e in moved if isinstance(e, Operation)] == [e for e in events if isinstance(e, Operation)]
    under_way: dict[tuple[str, ...], int] = {}
    for event in moved:
        if not isinstance(event, Operation):
            change = 1 if isinstance(event, Start) else -1
            under_way[words(event)] = under_way.get(words(event), 0) + change
            assert under_way[words(event)] >= 0
    assert set(under_way.values()) == {0}


def test_gathers_of_forward_start_a_block_ahead(events):
    moved = on_streams(events)
    at = {
        (type(e), e.module): i
        for i, e in reversed(list(enumerate(moved)))  # the first of each
        if not isinstance(e, Operation) and e.purpose == "weight" and e.phase == "forward"
    }
    first_work = next(i for i, e in enumerate(moved) if isinstance(e, Operation) and e.work == "matmul")
    assert at[Start, "model.layers.1"] < first_work < at[Wait, "model.layers.1"]


def test_a_gather_of_backward_is_waited_for_by_the_copy_into_the_weights(events):
    """In each micro-batch, whether it reduces gradients or not."""
    moved = on_streams(events)
    gathers = [
        i
        for i, e in enumerate(moved)
        if isinstance(e, Wait) and e.purpose == "weight" and e.phase == "backward"
    ]
    assert len(gathers) >= 2 * 3
    for wait in gathers:
        assert moved[wait + 1].name == "fsdp.split_with_sizes_copy.default"


def test_gradient_collectives_overlap_backward(events):
    moved = on_streams(events)
    for axis, kind in (("z", "reduce_scatter"), ("data", "all_reduce")):
        starts = [
            i
            for i, e in enumerate(moved)
            if isinstance(e, Start) and (e.axis, e.kind, e.purpose) == (axis, kind, "gradient")
        ]
        waits = [
            i
            for i, e in enumerate(moved)
            if isinstance(e, Wait) and (e.axis, e.kind, e.purpose) == (axis, kind, "gradient")
        ]
        work = [i for i, e in enumerate(moved) if isinstance(e, Operation) and e.phase == "backward"]
        assert len(starts) == len(waits) > 3
        # Something is computed between the first start and its wait, and after the last wait nothing of backward.
        assert any(starts[0] < i < waits[0] for i in work)
        assert waits[-1] > max(work)
    assert {
        e.follows for e in moved if isinstance(e, Start) and e.axis == "data" and e.purpose == "gradient"
    } == {"z"}
