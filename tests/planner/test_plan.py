"""`fourfold.plan`: formulas select the candidates, the simulation over dry runs ranks them."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

import fourfold as ff
from fourfold.dry_run.events import Operation, Start
from fourfold.planner import plan as planning
from fourfold.planner import workers
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.cost.compute import Kernels, memory_s, operation_s
from fourfold.planner.dry_run_estimate import Job, estimate_in_process, simulate_step
from fourfold.planner.inputs.cluster import LIBRARIES, preset
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.simulate import inner_ranks
from fourfold.planner.workers import estimate_by_dry_run, for_all

CLUSTER = preset("dgx-h100")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 96}  # fmt: skip
CONFIG = LlamaConfig(**SIZES)


@pytest.fixture(scope="module")
def found():
    return ff.plan(CONFIG, "dgx-h100", 4, sequences=8, length=32, simulate=3, quiet=True)


@pytest.mark.nightly
def test_the_first_layouts_are_simulated_and_ranked_by_simulated_time(found):
    simulated = [e for e in found.ranked if e.is_simulated]
    assert found.ranked[: len(simulated)] == simulated
    assert len(simulated) >= 3
    assert [e.step_s for e in simulated] == sorted(e.step_s for e in simulated)
    assert all(e.formula_s and e.step_s != e.formula_s for e in simulated)
    assert {e.layout.y > 1 for e in simulated} == {False, True}  # what y is worth is told by one measure
    assert {e.layout.by_tokens for e in simulated} == {False, True}
    assert not any(e.is_simulated for e in found.ranked[len(simulated) :])


@pytest.mark.nightly
def test_parts_of_a_simulated_step_add_up_to_the_step(found):
    for estimate in found.ranked:
        parts = sum(estimate.compute_s.values()) + sum(estimate.exposed_s.values())
        assert parts == pytest.approx(estimate.step_s, rel=1e-9)


def test_memory_is_that_of_the_dry_run(found):
    layout = found.best.layout
    done = ff.dryrun(CONFIG, layout.grid, sequences=8, length=32, micro_batches=layout.micro_batches,
                     activation_checkpointing=layout.activation_checkpointing, weights=layout.weights,
                     activations=layout.activations, overlap=ff.Overlap(keep_inputs=layout.keep_inputs))  # fmt: skip
    assert found.best.memory.total_bytes == done.peak.bytes


@pytest.mark.parametrize("kind", ["dict", "module", pytest.param("real module", marks=pytest.mark.nightly)])
def test_a_model_may_be_given_in_several_ways(kind, found):
    model = {"dict": CONFIG.to_dict(), "module": None, "real module": None}[kind]
    if kind != "dict":
        with torch.device("meta" if kind == "module" else "cpu"):
            model = LlamaForCausalLM(CONFIG)
    again = ff.plan(model, CLUSTER, 4, sequences=8, length=32, simulate=1, quiet=True)
    same = next(e for e in found.ranked if e.layout == again.best.layout)
    assert again.best.step_s == same.step_s
    if kind != "dict":
        assert isinstance(model.lm_head, nn.Linear)  # it is as it was


def test_a_layout_that_does_not_fit_by_the_dry_run_is_rejected_with_both_values(monkeypatch):
    tight = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, memory_gib=0.01))
    real = planning.for_all

    def larger(*given):
        for done in real(*given):
            more = 2.0**30 - done.memory.total_bytes + done.memory.logits_bytes
            yield dataclasses.replace(done, memory=dataclasses.replace(done.memory, logits_bytes=more))

    monkeypatch.setattr(planning, "for_all", larger)
    plan = ff.plan(CONFIG, tight, 2, sequences=4, length=32, simulate=2, quiet=True)
    over = [r for r in plan.rejected if "by the dry run" in r.reason]
    assert len(over) >= 2
    assert all("needs 1.0 GiB of 0.0" in r.reason for r in over)
    assert not any(e.is_simulated for e in plan.ranked)


class Own(nn.Module):
    """No Hugging Face model, and two blocks that are not alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 96, bias=False)
        self.loss_function = ForCausalLMLoss

    def forward(self, input_ids, labels, **more):
        logits = self.down(torch.relu(self.up(self.embed(input_ids))))
        return CausalLMOutput(loss=self.loss_function(logits, labels, 96, **more))

    def get_output_embeddings(self):
        return self.down


@pytest.mark.nightly
def test_a_module_without_formulas_is_dry_run_on_every_grid():
    with torch.device("meta"):
        model = Own()
    plan = ff.plan(model, CLUSTER, 2, sequences=2, length=8, quiet=True, checkpointing=("none",))
    assert "no formulas" in plan.notes[0]
    assert {e.layout.grid for e in plan.ranked} >= {(1, 2, 1, 1), (2, 1, 1, 1)}
    assert all(e.is_simulated and e.mfu is None for e in plan.ranked)
    assert plan.considered == len(plan.ranked) + len(plan.rejected)
    fewer = ff.plan(model, CLUSTER, 2, sequences=2, length=8, quiet=True, checkpointing=("none",), dry_runs=1)
    assert "were not tried" in fewer.notes[1]
    assert len(fewer.ranked) == 1


def test_an_argument_that_is_not_a_model_is_rejected():
    with pytest.raises(ValueError, match="int is not a model"):
        ff.plan(3, CLUSTER, 2, sequences=2, length=8)


@pytest.mark.nightly
def test_a_rank_plans_in_another_process(pool):
    assert pool.run(plan_on_a_rank, 1) == [2]


def plan_on_a_rank() -> int:
    ff.Grid.create((1, 1, 1, 1))
    return ff.plan(CONFIG, "dgx-h100", 2, sequences=4, length=32, simulate=1, quiet=True).best.layout.ranks


# -- prices of events -------------------------------------------------------------------------------------------------


def operation(work: str, flops: float = 0.0, moved: float = 0.0, shape=(1, 4096, 4096, 4096)) -> Operation:
    return Operation("forward", "m", "aten.x", work, flops, moved, shape)


def test_an_operator_costs_its_bytes_or_its_launch():
    device, kernels = CLUSTER.device, Kernels()
    assert operation_s(operation("memory", moved=1e9), CLUSTER) == pytest.approx(memory_s(1e9, device))
    assert operation_s(operation("memory", moved=8), CLUSTER) == device.launch_us * 1e-6
    assert operation_s(operation("attention", flops=1e15), CLUSTER) == pytest.approx(
        0.5e15 / (device.best_tflops * 1e12 * kernels.attention_share)
    )
    assert operation_s(operation("matmul"), CLUSTER) >= 2 * 4096**3 / (device.best_tflops * 1e12)


def seconds_of(start: Start, shape: tuple[int, int, int, int]) -> float:
    inner = inner_ranks(shape)[start.axis]
    return collective_s(start.kind, start.payload_bytes, start.ranks, inner, CLUSTER)


@pytest.mark.parametrize(
    ("axis", "inside", "apart"),
    [
        ("y", (1, 1, 2, 1), (1, 1, 2, 8)),
        ("z", (1, 2, 1, 1), (1, 2, 1, 8)),
        ("data", (2, 1, 1, 1), (2, 1, 1, 8)),
    ],
)
def test_a_collective_lies_where_the_axes_inside_it_put_it(axis, inside, apart):
    """Of two ranks, next to each other in a node of eight or in two nodes."""
    start = Start("forward", "m", axis, "all_gather", "weight", 2, 1e9)
    assert seconds_of(start, apart) > 3 * seconds_of(start, inside)


def test_faster_links_shorten_a_simulated_step():
    dry_run = estimate_by_dry_run(Job(CONFIG, 4, 32, "cuda"), Layout(1, 2, 1, 2))
    slow = dataclasses.replace(
        CLUSTER, links=dataclasses.replace(CLUSTER.links, device_gbps=1.0, measured_gbps=())
    )
    assert simulate_step(dry_run, CLUSTER)[0].step_s < simulate_step(dry_run, slow)[0].step_s


@pytest.mark.parametrize(("weights", "target"), [("fsdp2", "cuda"), ("streamed", "cpu")])
def test_micro_batches_that_are_left_out_are_extrapolated(weights, target):
    cluster = CLUSTER if target == "cuda" else dataclasses.replace(CLUSTER, library=LIBRARIES["gloo"])
    layout = Layout(1, 2, 1, 2, micro_batches=8, weights=weights)
    dry_run = estimate_by_dry_run(Job(CONFIG, 16, 32, target), layout)
    assert dry_run.left_out == 5
    step, parts = simulate_step(dry_run, cluster)
    whole, whole_parts = simulate_step(dry_run, cluster, keep_spans=True)  # all of them
    assert step.step_s == pytest.approx(whole.step_s, rel=1e-3)
    assert parts == pytest.approx(whole_parts, rel=1e-3)
    for name in ("link_s", "exposed_s"):
        assert getattr(step, name) == pytest.approx(getattr(whole, name), rel=1e-2), name


@pytest.mark.nightly
def test_dry_runs_in_processes_of_their_own_are_the_same(monkeypatch):
    monkeypatch.setattr(workers, "_WORTH_PROCESSES", 2)
    layouts = [Layout(1, 2, 1, 2), Layout(2, 1, 2, 1), Layout(1, 1, 1, 3)]
    job = Job(CONFIG, 4, 32, "cuda")
    *apart, rejected = for_all(partial(estimate_in_process, job), layouts)
    assert "x=3 does not divide num_attention_heads=4" in str(rejected)
    for layout, done in zip(layouts, apart, strict=False):
        assert done.trace == estimate_by_dry_run(job, layout).trace


@pytest.mark.parametrize("host_gbps", [64.0, 1e-3])
def test_a_simulation_waits_for_copies_to_the_host_that_take_longer_than_blocks(host_gbps):
    cluster = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, host_gbps=host_gbps))
    layout = Layout(1, 2, 1, 1, 1, "full", activation_offloading=True)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 6})
    job = Job(config, 4, 64, "cuda")
    step, _ = simulate_step(estimate_in_process(job, layout), cluster)
    copy_s = 2 * 64 * 64 * 2 / (host_gbps * 1e9 * cluster.device.host_share)
    assert step.link_s["host"] == pytest.approx((6 + 5) * copy_s)
    if host_gbps == 64.0:
        assert step.exposed_s.get("host", 0.0) == 0.0
    else:  # blocks of microseconds hide little of copies of milliseconds
        assert step.exposed_s["host"] == pytest.approx(10 * copy_s, rel=0.1)


def test_a_plan_for_cpus_says_that_offloading_has_no_effect():
    cpus = dataclasses.replace(CLUSTER, library=LIBRARIES["gloo"])
    found, plain = (
        ff.plan(CONFIG, cpus, 2, sequences=4, length=32, activation_offloading=off) for off in (True, False)
    )
    assert found.notes == ("activation_offloading has no effect on CPUs; leave it out.",)
    assert found.best == plain.best


@pytest.mark.nightly
def test_a_family_with_a_soft_cap_is_planned_with_flex_attention():
    config = Gemma2Config(**SIZES | {"head_dim": 16})
    given = {"sequences": 4, "length": 256, "quiet": True, "checkpointing": ("none",)}
    found, masked = (
        ff.plan(config, CLUSTER, 2, **given, attention=a, simulate=1) for a in ("auto", "masked")
    )
    layout = found.best.layout
    done = ff.dryrun(config, layout.grid, sequences=4, length=256, micro_batches=layout.micro_batches, weights=layout.weights,
                     activations=layout.activations, overlap=ff.Overlap(keep_inputs=layout.keep_inputs), attention="flex")  # fmt: skip
    assert found.best.memory.total_bytes == done.peak.bytes
    same = next(e for e in masked.ranked if e.layout == layout)
    assert same.memory.total_bytes > found.best.memory.total_bytes
