"""Experts that are cut over y and x: loss and gradients of one process; faults that would change them are caught."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from benchmarks import families
from benchmarks.families import Outcome
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_model
from fourfold import Grid, Lora, selftest
from fourfold.errors import UnsupportedError
from fourfold.hf import experts as storage
from fourfold.parallel import replace_modules
from fourfold.parallel.experts import cut
from fourfold.parallel.experts.whole_features import WholeFeatures
from fourfold.selftest import Errors, train_on
from tests.models import gradients, local_gradients, part

Shape = tuple[int, int, int, int]
OVER_BOTH: Shape = (1, 1, 2, 2)


def outcomes(
    names: tuple[str, ...],
    shape: Shape,
    activations: Any,
    options: dict[str, Any] | None,
    fault: Callable[[pytest.MonkeyPatch], None] | None,
) -> dict[str, Outcome]:
    """Of each family, against the stock model in one process."""
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        return {name: families.check_rank(name, shape, activations, options) for name in names}


def verify(pool: RankPool, names: tuple[str, ...], shape: Shape, activations: str, **options: Any) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    for found in pool.run(outcomes, ranks, names, shape, activations, options or None, None):
        assert {
            name: (each.status, each.detail[:300])
            for name, each in found.items()
            if each.status != "verified"
        } == {}


# The first: gates of shared experts; groups and a bias in the choice, latent attention; gate and up interleaved, biases.
VARIED = ("qwen2_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
def test_the_loss_and_gradients_of_one_process(pool: RankPool, activations: str) -> None:
    verify(pool, VARIED, OVER_BOTH, activations)


@pytest.mark.nightly
@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 1, 4), (1, 1, 4, 2)])
def test_other_grids(pool: RankPool, shape: Shape, activations: str) -> None:
    verify(pool, ("qwen3_moe", "llama4", *VARIED), shape, activations)


# Two micro-batches each.
@pytest.mark.parametrize(
    "options",
    [
        {"weights": "fsdp2", "activation_checkpointing": "full"},
        pytest.param(
            {"weights": "streamed", "activation_checkpointing": "selective", "accumulation": "sharded"},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"weights": "fsdp2", "accumulation": "sharded"}, marks=pytest.mark.nightly),
        pytest.param(
            {"weights": "streamed", "activation_checkpointing": "full", "chunked_loss": False},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"weights": "fsdp2", "activation_checkpointing": "selective"}, marks=pytest.mark.nightly
        ),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_with_other_options(pool: RankPool, options: dict[str, Any]) -> None:
    verify(pool, ("qwen3_moe", "deepseek_v3"), OVER_BOTH, "sequence-parallel", **options)


@pytest.mark.nightly
@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
def test_compiled(pool: RankPool, activations: str) -> None:
    options = {**families.EVERYTHING}
    verify(pool, VARIED, (1, 2, 2, 1), activations, **options)


MOE = {
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
}


def train(shape: Shape, chosen: int, options: dict[str, Any]) -> Errors:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selftest.KINDS, "qwen3_moe", MOE | {"num_experts_per_tok": chosen})
        return train_on(Grid.create(shape), "qwen3_moe", **options)


def test_three_steps_of_training(pool: RankPool) -> None:
    """AdamW and clipping, whose norm counts each part of an expert once."""
    errors = Errors.worst(pool.run(train, 4, OVER_BOTH, 2, {"activations": "sequence-parallel"}))
    assert errors.within_bars(), errors


def errors_in_bf16(shape: Shape, weights: Any) -> tuple[float, float]:
    """The largest error of a gradient against fp32: on the grid, and of the stock model in bf16.

    All experts are chosen: a near tie, which may fall otherwise in bf16, changes no choice.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selftest.KINDS, "qwen3_moe", MOE | {"num_experts_per_tok": 4})
        stock, rounded, model = (selftest.build("qwen3_moe") for _ in range(3))
    ids, labels = selftest.batches(4)[0]
    for each in (stock, rounded.to(torch.bfloat16)):
        each(input_ids=ids, labels=labels).loss.backward()
    grid = Grid.create(shape)
    report = ff.parallelize(model, grid, precision="bf16", weights=weights)
    model(input_ids=ids, labels=labels).loss.backward()
    exact, in_bf16 = gradients(stock), gradients(rounded)
    worst, worst_stock = 0.0, 0.0
    for name, local in local_gradients(model).items():
        assert local.dtype == torch.float32
        whole = exact[report.layouts[name].hf_name]
        error = (local - part(exact, report, grid, name)).abs().max() / whole.abs().max()
        worst = max(worst, float(error))
        difference = in_bf16[report.layouts[name].hf_name].float() - whole
        worst_stock = max(worst_stock, float(difference.abs().max() / whole.abs().max()))
    return worst, worst_stock


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_bf16_is_as_near_as_the_stock_model(pool: RankPool, weights: str) -> None:
    for error, of_stock in pool.run(errors_in_bf16, 4, OVER_BOTH, weights):
        assert error < 2 * of_stock < 0.2


def in_one_place(patch: pytest.MonkeyPatch) -> None:
    """Routers that give all tokens the same scores: ties everywhere, and two of four experts without any token."""
    before = families.tiny_model

    def without_routers(family: Any, **options: Any) -> Any:
        model = before(family, **options)
        for name in storage.beside_all_experts(model):
            for parameter in model.get_submodule(name).parameters():
                torch.nn.init.zeros_(parameter)
        return model

    patch.setattr(families, "tiny_model", without_routers)


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
def test_ties_and_experts_without_tokens(pool: RankPool, activations: str) -> None:
    for found in pool.run(outcomes, 4, ("qwen3_moe",), OVER_BOTH, activations, None, in_one_place):
        assert found["qwen3_moe"].status == "verified", found


# -- planted faults ---------------------------------------------------------------------------------------------------


def weights_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cut, "_summed", lambda tensor, *_, **__: tensor)


def routers_count_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WholeFeatures, "share", lambda self, whole: whole)


def gates_are_routers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cut, "_mapped", lambda output, function: output)


def halves_are_one(patch: pytest.MonkeyPatch) -> None:
    def seen(module: Any, name: str) -> storage.ExpertStorage:
        found = storage.storage_of(module, name)
        return storage.ExpertStorage(found.inner, found.features, found.hidden)

    patch.setattr(replace_modules, "storage_of", seen)


def rows_are_in_another_order(patch: pytest.MonkeyPatch) -> None:
    before = cut.gather

    def rolled(own: Tensor, collectives: Any, axis: Any, dim: int, *others: Any) -> Tensor:
        whole = before(own, collectives, axis, dim, *others)
        return whole.roll(1, dim) if own.is_floating_point() and own.ndim == 3 else whole

    patch.setattr(cut, "gather", rolled)


def routers_are_not_summed_over_tokens(patch: pytest.MonkeyPatch) -> None:
    before = replace_modules.ModuleReplacement._gradient_axes
    patch.setattr(
        replace_modules.ModuleReplacement,
        "_gradient_axes",
        lambda self, role: () if role.word == "router" else before(self, role),
    )


@pytest.mark.parametrize(
    ("fault", "activations"),
    [
        (weights_are_not_summed, "replicated"),
        (weights_are_not_summed, "sequence-parallel"),
        (routers_count_on_each_rank, "replicated"),
        (routers_count_on_each_rank, "sequence-parallel"),
        (gates_are_routers, "sequence-parallel"),
        (halves_are_one, "replicated"),
        (rows_are_in_another_order, "sequence-parallel"),
        (routers_are_not_summed_over_tokens, "sequence-parallel"),
    ],
)
def test_a_planted_fault_is_found(
    pool: RankPool, fault: Callable[[pytest.MonkeyPatch], None], activations: str
) -> None:
    found = pool.run(outcomes, 4, ("qwen2_moe",), OVER_BOTH, activations, None, fault)
    assert "failed" in {each["qwen2_moe"].status for each in found}, found


# -- what is refused ----------------------------------------------------------------------------------------------------


def refused(shape: Shape) -> dict[str, str]:
    grid, found = Grid.create(shape), {}

    def attempt(what: str, family: str, change: Callable[[Any], None] | None = None, **options: Any) -> None:
        model = tiny_model(find_family(family))
        if change is not None:
            change(model)
        with pytest.raises(UnsupportedError) as error:
            ff.parallelize(model, grid, **options)
        found[what] = str(error.value)

    def jitter(model: Any) -> None:
        model.model.layers[0].mlp.jitter_noise = 0.1

    attempt("jitter", "mixtral", jitter)
    attempt("experts", "qwen3_moe", lora=Lora(targets=("q_proj", "experts")))
    attempt("gate", "qwen2_moe", lora=Lora())
    return found


def test_what_is_refused_by_name(pool: RankPool) -> None:
    for found in pool.run(refused, 2, (1, 1, 2, 1)):
        assert "layers.0.mlp has jitter_noise=0.1" in found["jitter"]
        assert "layers.0.mlp.experts are experts, for whose 3D weights adapters" in found["experts"]
        assert re.search(r"shared_expert_gate is a linear of a router, or gates", found["gate"])


def adapters_of_attention(shape: Shape) -> float:
    """The loss of the first step with adapters of attention, which start at zero: that of the stock model."""
    family = find_family("qwen3_moe")
    stock, model = tiny_model(family), tiny_model(family)
    batch = families.tiny_batch(stock)
    ff.parallelize(model, Grid.create(shape), lora=Lora(targets=("q_proj", "v_proj")))
    loss = families.tiny_loss(model, batch)
    loss.backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora" in name for name in trained)
    return abs(loss.item() - families.tiny_loss(stock, batch).item())


def test_adapters_of_attention(pool: RankPool) -> None:
    assert max(pool.run(adapters_of_attention, 4, OVER_BOTH)) < 1e-5
