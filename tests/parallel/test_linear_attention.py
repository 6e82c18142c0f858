"""Linear attention, short convolutions, indexers of sparse attention and per-layer inputs on x and y: exact, or rejected by name."""

import importlib
import math
from typing import Any

import pytest
import torch

import fourfold as ff
from benchmarks.families import check_rank
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_batch, tiny_model
from fourfold import Grid, Lora, UnsupportedError
from fourfold.hf.families import FAMILIES
from tests.models import build

Shape = tuple[int, int, int, int]
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "shape", "activations", "options"),
    [
        ("qwen3_next", (1, 1, 1, 2), "sequence-parallel", {"weights": "fsdp2"}),
        ("jamba", (1, 1, 1, 2), "replicated", {}),
        pytest.param("qwen3_5_moe", (1, 2, 1, 2), "replicated", {"weights": "fsdp2"}, marks=nightly),
        pytest.param("olmo_hybrid", (1, 1, 4, 1), "sequence-parallel", {}, marks=nightly),
        pytest.param("kimi_linear", (1, 1, 2, 2), "sequence-parallel", {"compile": True}, marks=nightly),
        pytest.param("bailing_hybrid", (1, 1, 1, 4), "sequence-parallel", {}, marks=nightly),
        pytest.param(
            "lfm2_moe", (1, 1, 2, 2), "sequence-parallel", {"activation_checkpointing": "full"}, marks=nightly
        ),
        pytest.param("nemotron_h", (1, 2, 1, 2), "sequence-parallel", {"compile": True}, marks=nightly),
        pytest.param("minimax", (1, 1, 2, 2), "sequence-parallel", {"compile": True}, marks=nightly),
        pytest.param(
            "deepseek_v32",
            (1, 1, 2, 2),
            "sequence-parallel",
            {"activation_checkpointing": "selective"},
            marks=nightly,
        ),
        pytest.param("gemma4", (1, 1, 2, 2), "replicated", {"compile": True}, marks=nightly),
        pytest.param("gemma4:moe", (1, 2, 1, 2), "replicated", {"weights": "fsdp2"}, marks=nightly),
        pytest.param("glm_moe_dsa", (1, 2, 2, 1), "sequence-parallel", {}, marks=nightly),
    ],
)
def test_a_family_is_exact(
    pool: RankPool, name: str, shape: Shape, activations: Any, options: dict[str, Any]
) -> None:
    found = pool.run(check_rank, math.prod(shape), name, shape, activations, options)
    assert {outcome.status for outcome in found} == {"verified"}, found


def with_fault(fault: str) -> str:
    family = FAMILIES["qwen3_5_text"]
    broken = dict(family.packed)
    if fault == "channels as one segment":
        broken["*.linear_attn.conv1d"] = ("conv_dim",)
    else:
        broken["*.linear_attn.in_proj_qkv"] = ("key_dim", "value_dim", "key_dim")
    FAMILIES["qwen3_5_text"] = type(family)(family.roles, broken, family.inner_attributes)
    try:
        return check_rank("qwen3_5", (1, 1, 1, 2)).status
    finally:
        FAMILIES["qwen3_5_text"] = family


@pytest.mark.parametrize("fault", ["channels as one segment", "segments in another order"])
def test_a_wrong_segment_is_found(pool: RankPool, fault: str) -> None:
    assert pool.run(with_fault, 2, fault) == ["failed"] * 2


def kernels_with_out_proj() -> tuple[bool, bool]:
    """Does a step call the kernel that multiplies with the weight of out_proj: in one process, and on x = 2?"""
    module = importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h")
    stock, called = module.mamba2_split_conv1d_scan_combined, []
    module.mamba2_split_conv1d_scan_combined = lambda *_, **given: called.append("outproj_weight" in given)
    try:
        model = tiny_model(find_family("nemotron_h"))
        batch = tiny_batch(model)
        model(**batch, use_cache=False)
        before = len(called)
        ff.parallelize(model, Grid.create((1, 1, 1, 2)))
        model.train()(**batch, use_cache=False)
        return all(called) and before > 0, len(called) > before
    finally:
        module.mamba2_split_conv1d_scan_combined = stock


def test_no_kernel_takes_the_weight_of_a_projection(pool: RankPool) -> None:
    assert pool.run(kernels_with_out_proj, 2) == [(True, False)] * 2


def loss_of_meta(name: str, shape: Shape) -> float:
    stock = tiny_model(find_family(name))
    batch = tiny_batch(stock)
    with torch.device("meta"):
        model = type(stock)(stock.config)
    ff.parallelize(model.train(), Grid.create(shape), seed=3)
    return model(**batch).loss.item()


@pytest.mark.parametrize("name", ["minimax", pytest.param("nemotron_h", marks=nightly)])
def test_a_model_on_meta_has_the_values_of_one_rank(pool: RankPool, name: str) -> None:
    (alone,) = pool.run(loss_of_meta, 1, name, (1, 1, 1, 1))
    assert pool.run(loss_of_meta, 2, name, (1, 1, 1, 2)) == pytest.approx([alone] * 2, rel=1e-6)


def refusal(model: torch.nn.Module, shape: Shape, **options: Any) -> str:
    try:
        ff.parallelize(model, Grid.create(shape), **options)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def refusals() -> list[str]:
    def tiny(name: str) -> torch.nn.Module:
        return tiny_model(find_family(name))

    return [
        refusal(tiny("granitemoehybrid"), (1, 1, 1, 2)),
        refusal(tiny("jamba"), (1, 1, 1, 2), lora=Lora(rank=2, targets=("x_proj",))),
        refusal(build("qwen3_5", linear_num_key_heads=1), (1, 1, 1, 2)),
        refusal(build("qwen3_5"), (1, 1, 1, 2), compile=True),
    ]


def test_what_is_refused_by_name(pool: RankPool) -> None:
    granite, adapter, heads, compiled = pool.run(refusals, 2)[0]
    assert "GraniteMoeHybridForCausalLM has no role" in granite
    assert "model.layers.0.mamba.x_proj has an adapter" in adapter
    assert "x=2 does not divide num_k_heads=1 of model.layers.0.linear_attn" in heads
    assert "the gated delta rule is traced" in compiled
