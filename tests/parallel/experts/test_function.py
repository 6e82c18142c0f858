"""The experts function that keeps less for backward: the values of transformers' own, what autograd keeps, and its matmuls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import fourfold as ff
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_model
from fourfold import Grid
from fourfold.hf.experts import is_experts
from fourfold.parallel.experts import function
from fourfold.parallel.experts.function import NAME
from tests.models import batch, build

TOKENS, CHOSEN = 24, 3
# Rows [2f, h] and columns; [in, out]; gate and up in turns with biases; without a gate; gates of their own.
FAMILIES = ["qwen3_moe", "aria", "gpt_oss", "nemotron_h", "deepseek_v4", "minimax_m3_vl"]


class Case:
    """The experts of one layer of a small model, with inputs."""

    def __init__(self, family: str) -> None:
        torch.manual_seed(0)
        model = tiny_model(find_family(family))
        self.experts: Any = next(module for module in model.modules() if is_experts(module))
        with torch.no_grad():
            for parameter in self.experts.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter))
        down, experts = self.experts.down_proj, self.experts.num_experts
        self.features, self.hidden = down.shape[1:] if self.experts.is_transposed else down.shape[:0:-1]
        choices = [
            torch.randperm(max(experts - 1, 1))[:CHOSEN] for _ in range(TOKENS)
        ]  # the last expert has none
        self.choices = torch.stack(choices)
        self.x, self.gradient = torch.randn(2, TOKENS, self.hidden).bfloat16().float()
        self.weights = torch.rand(self.choices.shape)

    def run(self, name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], int]:
        """(output and gradients, numbers that autograd keeps besides weights)"""
        experts = self.experts.to(dtype)
        experts.config._experts_implementation = name
        x, weights = (t.clone().requires_grad_() for t in (self.x.to(dtype), self.weights))
        of_weights = {p.untyped_storage().data_ptr() for p in experts.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in of_weights:
                kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
            return tensor

        experts.zero_grad()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = experts(x, self.choices, weights)
        output.backward(self.gradient.to(dtype))
        found = [output.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]
        return [t.float() for t in found if t is not None], sum(kept.values())


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_grouped_mm_does(family: str) -> None:
    case = Case(family)
    exact, _ = case.run("grouped_mm")
    own, _ = case.run(NAME)
    assert torch.equal(own[0], exact[0])
    assert worst(own[1:], exact[1:]) < 2e-6
    # Experts round weights to bf16: the exact values are those of the rounded ones.
    stock, _ = case.run("grouped_mm", torch.bfloat16)
    own, _ = case.run(NAME, torch.bfloat16)
    assert torch.equal(own[0], stock[0])
    exact, _ = case.run("grouped_mm")
    assert worst(own, exact) < 1.5 * worst(stock, exact) < 0.03


def test_what_autograd_keeps() -> None:
    """T·h + 4·T·k·f numbers and the k·T weights, where `grouped_mm` keeps 2·T·k·h + 4·T·k·f; of other gates the inner part differs."""
    for family in FAMILIES:
        case = Case(family)
        stock, own = (case.run(name)[1] for name in ("grouped_mm", NAME))
        rows = CHOSEN * TOKENS * case.hidden
        assert stock - own == 2 * rows - TOKENS * case.hidden, family
        if family in ("qwen3_moe", "aria"):
            inner = 4 * TOKENS * CHOSEN * case.features
            assert own == TOKENS * case.hidden + inner + TOKENS * CHOSEN
            assert stock == 2 * rows + inner + TOKENS * CHOSEN


class _Matmuls(TorchDispatchMode):
    """The multiplications of grouped matmuls: rows, or what is summed over, of all groups together."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            rows, weight = args[:2]
            self.count += rows.shape[-2] * rows.shape[-1] * weight.shape[-1]
        return func(*args, **(kwargs or {}))


def test_it_multiplies_no_more() -> None:
    """Gate, up and down, in forward and twice in backward."""
    case = Case("qwen3_moe")
    for name in ("grouped_mm", NAME):
        with _Matmuls() as matmuls:
            case.run(name)
        assert matmuls.count == 9 * TOKENS * CHOSEN * case.hidden * case.features


def _without_the_weights_of_choices(patch: pytest.MonkeyPatch) -> None:
    before = function._gradients
    patch.setattr(
        function, "_gradients", lambda rows, *others: before(torch.ones_like(rows) * rows.mean(), *others)
    )


def _rows_in_another_order(patch: pytest.MonkeyPatch) -> None:
    before = function._sum_of_choices
    patch.setattr(function, "_sum_of_choices", lambda rows, *others: before(rows.roll(1, 0), *others))


@pytest.mark.parametrize("fault", [_without_the_weights_of_choices, _rows_in_another_order])
def test_a_planted_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("qwen3_moe")
    exact, _ = case.run("grouped_mm")
    fault(monkeypatch)
    assert worst(case.run(NAME)[0], exact) > 1e-2


# -- in models ----------------------------------------------------------------------------------------------------------


def on_a_grid(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """What reports say, and how many rows of matmuls a step with selective recomputation has against one without."""
    grid, found = Grid.create(shape), {}

    def report(family: str, **options: Any) -> str:
        model = tiny_model(find_family(family))
        if family == "olmoe":
            model.set_experts_implementation("eager")
        notes = ff.parallelize(model, grid, **options).notes
        return next(note for note in notes if note.startswith("experts function"))

    found["own"] = report("qwen3_moe")
    found["forward"] = report("llama4")
    found["asked"] = report("olmoe")
    found["compiled"] = report("qwen3_moe", compile=True)
    ids, labels = batch(4)
    for kind in ("none", "selective", "full"):
        model = build("qwen3_moe")
        ff.parallelize(model, grid, activation_checkpointing=kind)
        loss = model(input_ids=ids, labels=labels).loss
        with _Matmuls() as matmuls:
            loss.backward()
        found[kind] = matmuls.count
    return found


def test_what_the_report_says_and_recomputation_repeats(pool: RankPool) -> None:
    (found,) = pool.run(on_a_grid, 1, (1, 1, 1, 1))
    assert "fourfold in 2 modules, which keep each token once" in found["own"]
    assert "fourfold in 0 modules" in found["forward"]
    assert "has a forward of its own" in found["forward"]
    assert "experts_implementation='eager' was asked for" in found["asked"]
    assert "the model's own (in compiled blocks" in found["compiled"]
    backward = (
        2 * 2 * 4 * 12 * 2 * 3 * 32 * 16
    )  # layers, and tokens with two choices: gate, up and down twice
    assert found["none"] == found["selective"] == backward
    # The down projection's result is not needed again.
    assert found["full"] == backward + backward // 2 * 2 // 3
