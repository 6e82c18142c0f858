"""A step's cost: the traffic of the algorithm, and the laws of what hides and what is done twice."""

import dataclasses

import pytest
from transformers import LlamaConfig, Qwen2Config

from benchmarks import traffic
from fourfold import Overlap
from fourfold.dry_run.run import dryrun
from fourfold.planner.cost.memory import memory
from fourfold.planner.cost.step import Estimate, Prices
from fourfold.planner.inputs.cluster import preset
from fourfold.planner.inputs.layout import FOURFOLD, Layout
from fourfold.planner.inputs.workload import Workload, from_config
from tests.planner.cost.estimates import estimate
from tests.planner.cost.test_collective import bare

H100 = preset("dgx-h100")
LLAMA = Workload("8b", 4096, 14336, 32, 32, 8, 128, 128256)
GRIDS = [
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (1, 1, 8, 1),
    (1, 1, 1, 8),
    (1, 2, 2, 2),
    (2, 1, 2, 2),
    (2, 4, 1, 1),
    (2, 2, 1, 2),
]


@pytest.mark.parametrize("shape", traffic.GRIDS)
def test_link_times_are_the_bytes_of_the_algorithm(shape):
    """On a network of 1 GB/s without latency, seconds are the bytes that `benchmarks.traffic` counts, to the byte."""
    t = traffic
    workload = Workload("tiny", t.H, t.FFN, t.LAYERS, t.HEADS, t.KV_HEADS, t.HEAD_DIM, t.VOCABULARY)
    schedule = dataclasses.replace(FOURFOLD, weight_bytes=t.BYTES, gradient_bytes=t.BYTES)
    found = estimate(workload, Layout(*shape), bare(), t.BATCH, t.SEQUENCE, schedule)
    bytes_sent: dict[str, float] = {}
    for (axis, _), count in t.expected("llama", shape, "fsdp2").items():
        bytes_sent[axis] = bytes_sent.get(axis, 0.0) + float(count)
    data, z, y, x = shape
    tokens = t.BATCH * t.SEQUENCE / (data * z)
    # Counted apart there: two norms' statistics each way in every block, and three numbers a token for the loss.
    apart = {"y": 2 * 2 * t.LAYERS * 2 * (y - 1) / y * 4 * tokens, "x": 2 * (x - 1) / x * 12 * tokens}
    for axis in ("data", "z", "y", "x"):
        assert found.link_s[axis] * 1e9 == pytest.approx(bytes_sent.get(axis, 0.0) + apart.get(axis, 0.0))


SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8,
         "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
BY_TOKENS = [
    (LlamaConfig(**SIZES, num_key_value_heads=8), (1, 1, 4, 2), "none", True),
    (LlamaConfig(**SIZES, num_key_value_heads=8), (1, 2, 2, 2), "full", False),
    (
        LlamaConfig(**SIZES, num_key_value_heads=4),
        (1, 1, 2, 4),
        "none",
        False,
    ),  # a key/value head for two ranks
    (LlamaConfig(**SIZES, num_key_value_heads=8), (1, 1, 16, 1), "none", True),  # the core is on every y rank
    (Qwen2Config(**SIZES, num_key_value_heads=2), (1, 1, 2, 4), "none", True),  # more x than key/value heads
]


@pytest.mark.parametrize(("config", "shape", "recompute", "keep_inputs"), BY_TOKENS)
def test_sequence_parallel_collectives_and_flops_are_those_of_the_dry_run(
    config, shape, recompute, keep_inputs
):
    """Bytes on every axis to the last number of a loss or a norm; FLOPs without a factor that x or y ranks repeat."""
    data, z, y, x = shape
    sequences, length = 4 * data * z, 32
    layout = Layout(*shape, 1, recompute, activations="sequence-parallel", keep_inputs=keep_inputs)
    done = dryrun(config, shape, sequences=sequences, length=length, activations="sequence-parallel", weights="fsdp2",
                  activation_checkpointing=recompute, overlap=Overlap(keep_inputs=keep_inputs))  # fmt: skip
    workload = from_config(config.to_dict())
    found = estimate(workload, layout, bare(), sequences, length)
    bytes_sent: dict[str, float] = {}
    for e in done.collectives:
        passes = 2 if e.kind == "all_reduce" else 1
        bytes_sent[e.axis] = bytes_sent.get(e.axis, 0.0) + passes * (e.ranks - 1) / e.ranks * e.payload_bytes
    for axis in ("y", "x"):
        assert found.link_s[axis] * 1e9 == pytest.approx(bytes_sent.get(axis, 0.0), rel=5e-4)
    flops = {work: sum(o.flops for o in done.operations if o.work == work and o.phase in ("forward", "backward"))
             for work in ("matmul", "attention")}  # fmt: skip
    tokens, parts = 4 * length, x * y
    # Of key/value heads that are fewer than x, several ranks multiply the same.
    more_kv = 2 * workload.hidden * workload.kv_features * (x / min(x, workload.kv_heads) - 1)
    matrices = workload.layers * (sum(workload.block_matrices) + more_kv) + workload.table
    assert flops["matmul"] == pytest.approx(6 * tokens * matrices / parts)
    heads_over = parts if workload.divides_heads(parts) else x
    # Flash attention computes the scores again in backward: seven products in place of six.
    assert flops["attention"] == 14 * workload.layers * tokens * length * workload.q_features / heads_over


def test_what_is_gathered_again_is_the_inputs_of_the_linears():
    """As in docs/decisions/0018: over x the inputs of q, k, v, and of gate and up, over y those of o and down."""
    t, y, x, tokens = LLAMA, 2, 4, 4 * 2048
    kept, again = (estimate(LLAMA, Layout(1, 1, y, x, activations="sequence-parallel", keep_inputs=keep), bare(), 4, 2048)
                   for keep in (True, False))  # fmt: skip
    more = {axis: (again.link_s[axis] - kept.link_s[axis]) * 1e9 for axis in ("x", "y")}
    assert more["x"] == pytest.approx(2 * (x - 1) / x * 2 * t.layers * tokens * t.hidden / y)
    assert more["y"] == pytest.approx(2 * (y - 1) / y * t.layers * tokens * (t.q_features + t.ffn) / x)
    assert again.memory.total_bytes < kept.memory.total_bytes


def test_token_sharding_leaves_attention_and_elementwise_work_to_one_rank_of_y_and_x():
    def cost(activations):
        return estimate(LLAMA, Layout(1, 1, 2, 4, activations=activations), H100, 4, 2048)

    replicated, by_tokens = cost("replicated"), cost("sequence-parallel")
    assert by_tokens.compute_s["attention"] == pytest.approx(replicated.compute_s["attention"] / 2)
    assert by_tokens.compute_s["element-wise"] < 0.6 * replicated.compute_s["element-wise"]
    assert by_tokens.memory.activations_bytes < replicated.memory.activations_bytes


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_exposed_time_is_at_most_link_time(shape, micro_batches, recompute):
    found = estimate(LLAMA, Layout(*shape, micro_batches, recompute), H100, 64, 2048)
    for axis in found.link_s:
        assert 0 <= found.exposed_s[axis] <= found.link_s[axis] * H100.slowdown.communication + 1e-12
    assert found.step_s == pytest.approx(sum(found.compute_s.values()) + sum(found.exposed_s.values()))
    assert found.step_s > sum(found.compute_s.values()) or all(s == 0 for s in found.link_s.values())


def test_attention_is_repeated_by_every_rank_of_y():
    one = estimate(LLAMA, Layout(1, 1, 1, 2), H100, 4, 2048)
    two = estimate(LLAMA, Layout(1, 1, 4, 2), H100, 4, 2048)
    assert two.compute_s["attention"] == pytest.approx(one.compute_s["attention"])
    assert two.compute_s["matmul"] < 0.5 * one.compute_s["matmul"]


def test_heads_are_sharded_over_x():
    one = estimate(LLAMA, Layout(1, 1, 1, 1), H100, 4, 2048)
    two = estimate(LLAMA, Layout(1, 1, 1, 4), H100, 4, 2048)
    assert two.compute_s["attention"] == pytest.approx(one.compute_s["attention"] / 4)


def test_kept_weights_come_once():
    again = estimate(LLAMA, Layout(1, 8, 1, 1, weights="streamed"), H100, 64, 2048)
    kept = estimate(LLAMA, Layout(1, 8, 1, 1, keep_bytes=1 << 40, weights="streamed"), H100, 64, 2048)
    assert kept.link_s["z"] < again.link_s["z"]
    assert kept.memory.gathered_bytes > again.memory.gathered_bytes


def test_overlap_never_costs_time():
    nothing = dataclasses.replace(
        FOURFOLD,
        gathers_ahead=False,
        hides_scatters=False,
        hides_data=False,
        hides_backward=False,
        chunks_for=None,
    )
    for shape in GRIDS:
        plain = estimate(LLAMA, Layout(*shape), H100, 64, 2048, nothing)
        hidden = estimate(LLAMA, Layout(*shape), H100, 64, 2048)
        assert hidden.step_s <= plain.step_s * (1 + 1e-9)


def test_a_device_without_a_data_sheet_has_no_mfu():
    found = estimate(LLAMA, Layout(1, 12, 1, 1), preset("aurora"), 24, 2048)
    assert found.mfu is None
    assert found.hfu is None
    assert found.tokens_per_s > 0


def test_mfu_and_hfu_differ_by_recomputation():
    none = estimate(LLAMA, Layout(1, 8, 1, 1), H100, 64, 2048)
    full = estimate(LLAMA, Layout(1, 8, 1, 1, 1, "full"), H100, 64, 2048)
    assert none.mfu == none.hfu
    assert full.mfu < full.hfu < full.mfu * 4 / 3
    assert full.step_s > none.step_s


def test_states_are_cut_over_z_y_and_x_and_not_over_data():
    def states(*shape: int) -> float:
        peak = memory(LLAMA, Layout(*shape), 2048, length=64)
        return peak.parameters_bytes + peak.optimizer_bytes

    alone = states(1, 1, 1, 1)
    assert alone == pytest.approx(12 * LLAMA.parameters, rel=0.35)  # the optimizer's step adds a temporary
    assert states(8, 1, 1, 1) == pytest.approx(alone)
    assert memory(LLAMA, Layout(1, 8, 1, 1), 64, length=64).parameters_bytes == pytest.approx(
        4 * LLAMA.parameters / 8, rel=1e-3
    )
    assert memory(LLAMA, Layout(1, 2, 2, 2), 64, length=64).parameters_bytes == pytest.approx(
        4 * LLAMA.parameters / 8, rel=1e-3
    )


def test_recomputing_holds_less():
    assert (
        memory(LLAMA, Layout(1, 8, 1, 1, 1, "full"), 16384, length=64).total_bytes
        < 0.5 * memory(LLAMA, Layout(1, 8, 1, 1), 16384, length=64).total_bytes
    )


def test_prices_are_those_of_a_fresh_estimate():
    prices = Prices(LLAMA, H100, 2048)
    for shape in GRIDS:
        prices.passes(8192.0, shape[2], shape[3])
    fresh = Prices(LLAMA, H100, 2048)
    assert prices.passes(8192.0, 2, 2) == fresh.passes(8192.0, 2, 2)


def test_halves_that_take_turns_hide_more():
    turns = dataclasses.replace(FOURFOLD, interleaves=True)
    for shape in ((1, 1, 1, 8), (1, 1, 4, 2), (1, 2, 2, 2)):
        alone = estimate(LLAMA, Layout(*shape), H100, 16, 2048)
        both = estimate(LLAMA, Layout(*shape), H100, 16, 2048, turns)
        assert both.link_s == alone.link_s
        assert sum(both.exposed_s.values()) < sum(alone.exposed_s.values())


def test_fp32_work_on_one_z_holds_no_second_copy():
    layout = Layout(1, 1, 1, 2, weights="streamed")
    assert memory(LLAMA, layout, 64, work_bytes=4, length=64).gathered_bytes == 0
    assert memory(LLAMA, layout, 1 << 16, length=64).gathered_bytes > 0


def test_matrix_by_matrix_has_more_latency_and_the_same_bytes():
    together = estimate(LLAMA, Layout(1, 64, 1, 1), H100, 64, 2048)
    apart = estimate(LLAMA, Layout(1, 64, 1, 1, weights="streamed"), H100, 64, 2048)
    assert apart.link_s["z"] > together.link_s["z"]
    bytes_alone = [
        estimate(LLAMA, Layout(1, 64, 1, 1, weights=weights), bare(), 64, 2048).link_s["z"]
        for weights in ("fsdp2", "streamed")
    ]
    assert bytes_alone[0] == pytest.approx(bytes_alone[1])


def test_copies_to_the_host_show_where_they_take_longer_than_a_block():
    def with_link(gbps: float) -> Estimate:
        cluster = dataclasses.replace(H100, device=dataclasses.replace(H100.device, host_gbps=gbps))
        layout = Layout(1, 8, 1, 1, 1, "full", activation_offloading=True)
        return estimate(LLAMA, layout, cluster, 32, 8192)

    kept = estimate(LLAMA, Layout(1, 8, 1, 1, 1, "full"), H100, 32, 8192)
    fast, slow, slower = map(with_link, (64.0, 1.0, 0.5))
    assert kept.compute_s["host copies"] == fast.compute_s["host copies"] == 0.0
    assert fast.step_s == kept.step_s
    assert fast.memory.total_bytes < kept.memory.total_bytes
    # Once they show everywhere, twice the time of a copy shows as much more: 31 inputs, there and back.
    copy_s = 4 * 8192 * LLAMA.hidden * 2 / (1e9 * H100.device.host_share)
    more_s = slower.compute_s["host copies"] - slow.compute_s["host copies"]
    assert more_s == pytest.approx(2 * 31 * copy_s)
    assert slower.step_s == pytest.approx(kept.step_s + slower.compute_s["host copies"])


def test_flex_attention_is_computed_again_unless_the_block_is_compiled():
    flex = LLAMA.attended("flex", "cuda", "bf16")
    layout = Layout(1, 8, 1, 1, 1, "selective")
    schedules = (FOURFOLD, dataclasses.replace(FOURFOLD, elementwise="compiled"))
    for schedule, more in zip(schedules, (True, False), strict=True):
        plain, again = (estimate(w, layout, H100, 8, 8192, schedule) for w in (LLAMA, flex))
        forward_s = plain.compute_s["attention"] / 3.5  # backward is 2.5 times as long
        expected_s = forward_s if more else 0.0
        recomputed_s = again.compute_s["recomputation"] - plain.compute_s["recomputation"]
        assert recomputed_s == pytest.approx(expected_s)
