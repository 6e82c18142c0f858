"""Formulas for mixtures of experts: parameters and work of the stock model, memory and traffic of dry runs, and what a plan chooses."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from fourfold import Overlap
from fourfold.dry_run.events import Start
from fourfold.dry_run.run import DryRun, dryrun
from fourfold.planner.cost.memory import memory
from fourfold.planner.cost.step import Prices, estimate_with
from fourfold.planner.inputs.cluster import preset
from fourfold.planner.inputs.experts import SPARSE, Experts, load_of, owners_of
from fourfold.planner.inputs.layout import FOURFOLD, Layout
from fourfold.planner.inputs.workload import Workload, from_config
from fourfold.planner.plan import fitting_load
from fourfold.planner.search import search

BAR = 0.05
COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "num_hidden_layers": 4,
}
MODELS = {
    "mixtral": MixtralConfig(**COMMON, intermediate_size=896, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=256, head_dim=64, num_experts=32, num_experts_per_tok=4
    ),
    # Values as wide as keys: others have no fused kernel on a CPU.
    "deepseek_v3": DeepseekV3Config(
        **COMMON | {"num_hidden_layers": 5, "num_key_value_heads": 8},
        moe_intermediate_size=256,
        intermediate_size=1024,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        q_lora_rank=192,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
    ),
}
SEQUENCES, LENGTH = 4, 256  # of one rank's micro-batch
TOKENS: dict[str, Any] = {"activations": "sequence-parallel"}
OWNED: dict[str, Any] = {"experts": ("z",)}
EVERY_CHANGE = [
    ("mixtral", Layout(1, 4, 1, 1), 1.0),
    ("qwen3_moe", Layout(2, 4, 1, 1, 2, "full", **OWNED), 1.0),
    ("deepseek_v3", Layout(1, 4, 1, 1, **OWNED), 1.0),
    ("qwen3_moe", Layout(1, 2, 1, 2, **TOKENS, experts=("z", "x")), 1.0),
]
POINTS = [
    ("mixtral", Layout(1, 4, 1, 1, **OWNED), 1.0),
    ("mixtral", Layout(1, 4, 1, 1, **OWNED), 1.5),
    ("mixtral", Layout(1, 2, 1, 2, **TOKENS), 1.0),
    ("mixtral", Layout(1, 2, 1, 2, **OWNED, **TOKENS), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1, 1, "full"), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1, 1, "full", weights="streamed"), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1, 1, "selective"), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1, **OWNED), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1, weights="streamed", **OWNED), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1, 1, "full", **OWNED), 1.0),
    ("qwen3_moe", Layout(1, 4, 1, 1, 1, "selective", **OWNED), 1.0),
    ("qwen3_moe", Layout(2, 4, 1, 1, 3, "full", accumulation="sharded", **OWNED), 1.0),
    ("qwen3_moe", Layout(1, 2, 1, 2, **TOKENS, experts=("x",)), 1.0),
    ("qwen3_moe", Layout(1, 2, 1, 2, 1, "selective", **TOKENS, experts=("z", "x")), 1.0),
    ("mixtral", Layout(1, 2, 2, 2, **TOKENS, experts=("x",)), 1.0),
    ("deepseek_v3", Layout(1, 4, 1, 1), 1.0),
    ("deepseek_v3", Layout(1, 4, 1, 1, 1, "full", **OWNED), 1.0),
]


@functools.cache
def dry_run(model: str, layout: Layout, load: float) -> DryRun:
    return dryrun(
        MODELS[model],
        layout.grid,
        sequences=SEQUENCES * layout.micro_batches * layout.data * layout.z,
        length=LENGTH,
        micro_batches=layout.micro_batches,
        activations=layout.activations,
        activation_checkpointing=layout.activation_checkpointing,
        weights=layout.weights,
        accumulation=layout.accumulation,
        overlap=Overlap(keep_inputs=layout.keep_inputs),
        experts=layout.experts,
        expert_load=load,
    )


def workload_of(model: str) -> Workload:
    return from_config(MODELS[model].to_dict())


@pytest.mark.parametrize(
    ("model", "layout", "load"),
    [*EVERY_CHANGE, *(pytest.param(*point, marks=pytest.mark.nightly) for point in POINTS)],
    ids=str,
)
def test_memory_is_that_of_the_dry_run(model: str, layout: Layout, load: float) -> None:
    found = memory(workload_of(model), layout, SEQUENCES * LENGTH, length=LENGTH, expert_load=load)
    assert found.total_bytes == pytest.approx(dry_run(model, layout, load).peak.bytes, rel=BAR)


@pytest.mark.parametrize("family", SPARSE)
def test_parameters_are_those_of_the_stock_model(family: str) -> None:
    """The default configuration of each family, but for norms of q and k and biases of routers."""
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert from_config(config.to_dict()).parameters == pytest.approx(parameters, rel=1e-5)


def test_rows_are_sent_as_in_the_dry_run() -> None:
    """What is priced for z in a micro-batch: rows of forward, of backward, and of what is recomputed, at a load."""
    w, layout, load = workload_of("qwen3_moe"), Layout(1, 4, 1, 1, 1, "full", **OWNED), 1.5
    priced: list[float] = []

    class Counting(Prices):
        def collective_s(self, kind: Any, payload_bytes: float, ranks: int, inner_ranks: int) -> float:
            if kind == "all_to_all":
                priced.append(payload_bytes)
            return 0.0

    prices = Counting(w, preset("dgx-h100"), LENGTH, FOURFOLD, expert_load=load)
    prices.passes(SEQUENCES * LENGTH, 1, 1, owners=owners_of(layout.experts, 4, 1, 1))
    rows = SEQUENCES * LENGTH * 4
    sent: dict[str, float] = {"dispatch": 0.0, "combine": 0.0, "counts": 0.0}
    for event in dry_run("qwen3_moe", replace(layout, activation_checkpointing="none"), load).trace.events:
        if isinstance(event, Start) and event.purpose in sent:
            sent[event.purpose] += event.payload_bytes / w.layers
    # Of the rank with most: it sends its own rows and the gradients of what it got.
    assert sent["dispatch"] == sent["combine"] == (1 + load) * rows * w.hidden * 2
    assert priced == [load * rows * w.hidden * 2, sent["counts"]]


def test_who_owns_experts() -> None:
    assert owners_of("cut", 8, 1, 1) is None
    assert owners_of(("z",), 1, 1, 8) is None
    assert owners_of(("z",), 16, 1, 4) == (("z",), 16, 4)
    assert owners_of(("x",), 16, 1, 4) == (("x",), 4, 1)
    e = Experts(64, 8, 32)
    assert load_of(e, None, "worst") == 1.0
    # Four experts on each rank: of the eight choices of a token four can go to one rank, half a choice does on average.
    assert load_of(e, owners_of(("z",), 16, 1, 1), "worst") == 8.0
    assert load_of(e, owners_of(("z",), 16, 1, 1), 1.5) == 1.5


def test_a_search_finds_and_rejects_owners() -> None:
    """Experts for which one node's memory is too small when they are gathered; and 8 experts for 16 ranks."""
    wide = Workload("wide", 2048, 2048, 8, 16, 16, 128, 32000, experts=Experts(64, 2, 8192))
    prices = Prices(wide, preset("dgx-h100"), 4096, FOURFOLD)
    found = search(prices, 16, 16, activations=("replicated",))
    assert found.best.layout.experts == ("z",)
    assert prices.owners(found.best.layout) is not None
    few = replace(wide, experts=Experts(8, 2, 8192))
    found = search(replace(prices, workload=few), 16, 16, activations=("replicated",))
    assert any("z=16 does not divide the 8 experts" in r.reason for r in found.rejected)
    alone = search(prices, 16, 16, activations=("replicated",), experts=("cut",))
    assert {e.layout.experts for e in alone.ranked} <= {"cut"}
    # The more rows one rank has, the longer the step, until memory runs out.
    layout = search(prices, 16, 16, experts=(("z",),)).best.layout
    steps = [estimate_with(replace(prices, expert_load=load), layout, 16).step_s for load in (1.0, 2.0)]
    assert steps[0] < steps[1]
    limit_bytes = 1.05 * prices.memory(layout, prices.tokens_at_once(layout, 16)).total_bytes
    load = fitting_load(prices, layout, 16, limit_bytes)
    assert load is not None
    over = replace(prices, expert_load=load + 0.1).memory(layout, prices.tokens_at_once(layout, 16))
    assert over.total_bytes > limit_bytes


def test_owned_wins_below_the_crossing_and_loses_above() -> None:
    """T* = 1.5 (1 + 1/n) E f / k, by seconds of links inside a node."""
    w = Workload("8x", 4096, 8192, 4, 32, 8, 128, 32000, experts=Experts(8, 2, 8192))
    crossing = 1.5 * 2 * 8 * 8192 / 2
    prices = Prices(w, preset("dgx-h100"), 4096, replace(FOURFOLD, elementwise="eager"))

    def on_z_s(tokens: float, experts: Any) -> float:
        layout = Layout(1, 8, 1, 1, experts=experts)
        return estimate_with(prices, layout, 8 * round(tokens / 4096)).link_s["z"]

    for share, is_owned in ((0.9, True), (1.1, False)):
        tokens = share * crossing
        assert (on_z_s(tokens, ("z",)) < on_z_s(tokens, "cut")) == is_owned
