"""The search finds the same as exhaustive search, and gives the reason for every rejected layout."""

import itertools
from dataclasses import replace

import pytest

from fourfold.mesh.axes import factorisations
from fourfold.parallel.checkpointing import KINDS
from fourfold.planner.cost.step import Prices
from fourfold.planner.inputs.cluster import preset
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload
from fourfold.planner.search import RESERVE, search, why_not_grid
from tests.planner.cost.estimates import estimate

CLUSTER = preset("dgx-a100")
SMALL = Workload("small", 768, 3072, 6, 12, 4, 64, 50257)
LARGE = Workload("70b", 8192, 28672, 80, 64, 8, 128, 128256)


def test_the_best_is_that_of_trying_everything():
    plan = search(Prices(SMALL, CLUSTER, 1024), 16, 32)
    limit = CLUSTER.device.memory_gib * 2**30 * (1 - RESERVE)
    tried = []
    for data, z, y, x in factorisations(16):
        if 12 % x or (4 % x if x <= 4 else x % 4) or 3072 % x or 768 % y or 32 % (data * z):
            continue
        for micro_batches in range(1, 33):
            if 32 % (data * z * micro_batches):
                continue
            ways = [("replicated", True), ("sequence-parallel", True), ("sequence-parallel", False)]
            adds_up = ("whole", "sharded") if micro_batches > 1 and z > 1 else ("whole",)
            for recompute, way, sums in itertools.product(KINDS, ways if x * y > 1 else ways[:1], adds_up):
                layout = Layout(data, z, y, x, micro_batches, recompute, 0, "fsdp2", *way, None, sums)
                found = estimate(SMALL, layout, CLUSTER, 32, 1024)
                if found.memory.total_bytes <= limit:
                    tried.append(found)
    # Each layout is there once, with the least recomputation.
    assert 3 * len(plan.ranked) == len(tried)
    assert plan.best.step_s == pytest.approx(min(found.step_s for found in tried))
    assert [e.step_s for e in plan.ranked] == sorted(e.step_s for e in plan.ranked)


def test_nothing_that_is_ranked_is_over_the_limit_and_nothing_is_lost():
    plan = search(Prices(LARGE, CLUSTER, 4096), 64, 128)
    assert plan.considered == len(plan.ranked) + len(plan.rejected)
    assert all(e.memory.total_bytes <= plan.memory_limit_bytes for e in plan.ranked)
    assert all(e.layout.ranks == 64 for e in plan.ranked)


def test_as_little_is_recomputed_as_fits():
    plan = search(Prices(LARGE, CLUSTER, 4096), 64, 128)
    mixed = [e for e in plan.ranked if e.layout.checkpointed_blocks is not None]
    assert {e.layout.activation_checkpointing for e in mixed} == {"selective", "full"}
    for found in mixed[:50]:
        layout = found.layout
        fewer = replace(layout, checkpointed_blocks=layout.checkpointed_blocks - 1)
        more = replace(layout, checkpointed_blocks=None)
        over, slower = (estimate(LARGE, other, CLUSTER, 128, 4096) for other in (fewer, more))
        assert over.memory.total_bytes > plan.memory_limit_bytes
        assert slower.memory.total_bytes <= found.memory.total_bytes
        assert over.step_s < found.step_s < slower.step_s
    kinds = {e.layout.activation_checkpointing for e in plan.ranked}
    fixed = search(Prices(LARGE, CLUSTER, 4096), 64, 128, checkpointing=("full",))
    assert kinds == set(KINDS)
    assert {(e.layout.activation_checkpointing, e.layout.checkpointed_blocks) for e in fixed.ranked} == {
        ("full", None)
    }


def test_reasons_name_both_numbers():
    assert (
        why_not_grid(LARGE, (1, 1, 1, 48), 64) == "x=48 does not divide num_attention_heads=64; use x <= 32"
    )
    assert "num_key_value_heads=4" in str(why_not_grid(SMALL, (1, 1, 1, 6), 64))
    assert "hidden_size=768" in str(why_not_grid(SMALL, (1, 1, 5, 1), 64))
    assert "data*z=7 does not divide the global batch of 64" in str(why_not_grid(SMALL, (7, 1, 1, 1), 64))
    fused = replace(SMALL, fused_qkv=True)
    assert "in one matrix with the query heads; use x <= 4" in str(why_not_grid(fused, (1, 2, 2, 12), 64))
    assert why_not_grid(SMALL, (1, 2, 2, 12), 64) is None  # more x than key/value heads: they are replicated


def test_token_sharding_is_searched_or_left_out():
    both = search(Prices(LARGE, CLUSTER, 4096), 64, 128)
    assert {(e.layout.activations, e.layout.keep_inputs) for e in both.ranked} == {
        ("replicated", True), ("sequence-parallel", True), ("sequence-parallel", False)}  # fmt: skip
    assert not any(e.layout.by_tokens for e in both.ranked if e.layout.x * e.layout.y == 1)
    without = search(Prices(LARGE, CLUSTER, 4096), 64, 128, activations=("replicated",))
    assert without.ranked == [e for e in both.ranked if not e.layout.by_tokens]
    # Where there is one tensor rank there is nothing to cut.
    alone = search(
        Prices(LARGE, CLUSTER, 4096), 64, 128, activations=("sequence-parallel",), keep_inputs=(False,)
    )
    assert {(e.layout.by_tokens, e.layout.keep_inputs) for e in alone.ranked if e.layout.x * e.layout.y > 1} == {
        (True, False)}  # fmt: skip


def test_the_given_size_of_kept_weights_is_planned_for():
    def kept(**options):
        plan = search(Prices(SMALL, CLUSTER, 1024), 16, 32, weights="streamed", **options)
        return {e.layout.keep_bytes for e in plan.ranked if e.layout.z > 1}

    assert len(kept()) > 1
    assert kept(keep_bytes=4096) == {4096}
    assert kept(keep_bytes=0) == {0}


def test_tokens_that_do_not_divide_are_named():
    # Also where those of two sequences would: a run has batches of one, too.
    plan = search(Prices(SMALL, CLUSTER, 6), 16, 16)
    reasons = {r.reason for r in plan.rejected if r.layout.by_tokens}
    assert "x=4 does not divide the 6 tokens of a sequence, so they cannot be sharded" in reasons
    assert not any(e.layout.by_tokens for e in plan.ranked if 6 % e.layout.x or 6 % e.layout.y)
    # And nobody who asked for sequence-parallel ones is given others.
    asked = search(Prices(SMALL, CLUSTER, 6), 16, 16, activations=("sequence-parallel",))
    assert all(e.layout.by_tokens for e in asked.ranked if e.layout.x * e.layout.y > 1)


def test_a_model_that_fits_nowhere_says_how_far_it_is():
    plan = search(Prices(LARGE, CLUSTER, 4096), 2, 2)
    assert not plan.ranked
    with pytest.raises(ValueError, match=r"none of \d+ layouts of 2 ranks can run.*needs .* GiB of 72"):
        _ = plan.best


def test_more_reserve_never_adds_layouts():
    fewer = search(Prices(LARGE, CLUSTER, 4096), 64, 128, reserve=0.5)
    more = search(Prices(LARGE, CLUSTER, 4096), 64, 128, reserve=0.0)
    assert len(fewer.ranked) <= len(more.ranked)
