"""Float8: every grid has the numbers of one process whose linears are rounded as the recipe says, compared in fp64."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fourfold as ff
from benchmarks.float8 import BAR
from benchmarks.parity import run_rank
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.errors import UnsupportedError
from fourfold.mesh.collectives import Pending
from fourfold.parallel.float8.choice import check_device, linears_in_float8
from fourfold.parallel.product.product import Product
from fourfold.selftest import Errors
from tests.models import batch, build

Shape = tuple[int, int, int, int]
RECIPE = "rowwise_with_gw_hp"


def train(shape: Shape, kind: str, options: dict[str, Any]) -> Errors:
    return run_rank(shape, kind, None, options | {"float8": RECIPE})


NIGHTLY = pytest.mark.nightly
KINDS = ("llama", "gpt2", "qwen3", "gemma2", "gpt_neox")


@pytest.mark.parametrize(
    ("shape", "kind", "options"),
    [
        ((1, 1, 2, 2), "llama", {}),
        ((1, 2, 1, 1), "gpt2", {"weights": "fsdp2"}),
        pytest.param((1, 1, 2, 1), "qwen3", {"compile": True, "weights": "fsdp2", "activation_checkpointing": "selective"}, marks=NIGHTLY),
        *(pytest.param((1, 2, 2, 2), kind, {"weights": "fsdp2"}, marks=NIGHTLY) for kind in KINDS),
        *(pytest.param((1, 2, 2, 2), kind, {"weights": "streamed", "activations": "replicated"}, marks=NIGHTLY) for kind in KINDS),
        *(pytest.param((1, 2, 2, 2), kind, {"compile": True}, marks=NIGHTLY) for kind in KINDS),
        pytest.param((1, 2, 2, 2), "llama", {"activation_checkpointing": "selective"}, marks=NIGHTLY),
        pytest.param((1, 2, 2, 2), "llama", {"activation_checkpointing": "full", "activations": "replicated"}, marks=NIGHTLY),
        pytest.param((1, 2, 2, 2), "gpt2", {"micro_batches": 2, "accumulation": "sharded"}, marks=NIGHTLY),
        pytest.param((2, 2, 1, 2), "qwen3", {"weights": "fsdp2", "micro_batches": 2, "accumulation": "sharded"}, marks=NIGHTLY),
        pytest.param((1, 2, 2, 2), "llama", {"overlap": ff.Overlap(keep_inputs=False)}, marks=NIGHTLY),
        pytest.param((1, 1, 1, 8), "llama", {}, marks=NIGHTLY),  # four key/value heads on eight ranks
        pytest.param((1, 1, 8, 1), "gpt_neox", {}, marks=NIGHTLY),
    ],
)  # fmt: skip
def test_a_grid_has_the_numbers_of_one_process(
    pool: RankPool, shape: Shape, kind: str, options: dict[str, Any]
) -> None:
    found = Errors.worst(pool.run(train, math.prod(shape), shape, kind, options))
    assert max(found.loss, found.gradient, found.parameter) < BAR, found


def train_by_local_scales(shape: Shape) -> Errors:
    """Each rank scales by the largest magnitude of its own part of a row."""
    real = Product.shared_scales
    Product.shared_scales = lambda *_: lambda largest: Pending()  # type: ignore[method-assign, assignment]
    try:
        return train(shape, "llama", {})
    finally:
        Product.shared_scales = real  # type: ignore[method-assign]


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), pytest.param((1, 1, 1, 2), marks=NIGHTLY)])
def test_a_scale_of_a_part_of_a_row_is_found(pool: RankPool, shape: Shape) -> None:
    # Scales are powers of two: what differs are the small numbers, which e4m3 has fewer bits for.
    assert Errors.worst(pool.run(train_by_local_scales, 2, shape)).gradient > 1000 * BAR


def losses_and_products(float8: str) -> tuple[float, float, int]:
    """A loss and a weight's gradient in fp32, and how often a step multiplied e4m3."""
    grid = Grid.create((1, 1, 1, 1))
    ids = batch(2, 16)[0]
    model = build("llama")
    ff.parallelize(model, grid, float8=float8)  # type: ignore[arg-type]
    model(
        input_ids=ids, labels=ids
    ).loss.backward()  # linears that share an input are found in the first step
    model.zero_grad()
    with torch.profiler.profile() as profile:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    weight: Any = next(p for n, p in model.named_parameters() if n.endswith("layers.0.mlp.up_proj.weight"))
    products = sum(e.count for e in profile.key_averages() if e.key == "aten::_scaled_mm")
    return loss.item(), float(weight.grad.to_local().abs().max()), products


def test_the_option_multiplies_in_e4m3(pool: RankPool) -> None:
    (without,) = pool.run(losses_and_products, 1, "none")
    (with_it,) = pool.run(losses_and_products, 1, RECIPE)
    linears = len(linears_in_float8(build("llama"))[0])
    assert without[2] == 0
    assert with_it[2] == 2 * linears  # outputs and gradients of inputs, and no gradient of a weight
    for before, after in zip(without[:2], with_it[:2], strict=True):
        assert 1e-7 < abs(after / before - 1) < 0.1


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_model_without_sizes_that_divide_is_refused() -> None:
    model = build("llama", hidden_size=24, intermediate_size=40, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(
        UnsupportedError, match=r"self_attn.q_proj has 24 input and .* multiples of 16.*float8='none'"
    ):
        linears_in_float8(model)


def test_a_linear_whose_sizes_do_not_divide_stays_in_the_precision() -> None:
    model = build("llama", hidden_size=64, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2)
    chosen, others = linears_in_float8(model)
    assert {name.rpartition(".")[2] for name in chosen} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.rpartition(".")[2] for name in others} == {"gate_proj", "up_proj", "down_proj"}


def test_fp32_on_gpus_is_refused() -> None:
    grid: Any = SimpleNamespace(target="cuda", device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"float8 with precision='fp32' .* use precision='bf16'"):
        check_device(grid, "fp32")


def test_a_gpu_without_e4m3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grid: Any = SimpleNamespace(target="cuda", device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        UnsupportedError, match=r"A100.* compute capability 8\.0, .* need 8\.9; use float8='none'"
    ):
        check_device(grid, "bf16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(grid, "bf16")


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="float8 'tensorwise' is not supported"):
        ff.dryrun(build("llama"), (1, 1, 1, 1), sequences=1, length=16, float8="tensorwise")
