"""Each parallel layer matches the stock module in outputs and gradients, with the expected traffic."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import fourfold as ff
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_model
from fourfold import Grid
from tests.models import assert_shards_close, gradients, local_gradients, random

Shape = tuple[int, int, int, int]
GRIDS_OF_4: list[Shape] = [(1, 1, 2, 2), (1, 1, 1, 4), (1, 1, 4, 1)]
HIDDEN, INNER = 16, 24


def on_y(tensor: Tensor, grid: Grid) -> Tensor:
    """This rank's shard of the hidden features."""
    return tensor.chunk(grid.y, dim=-1)[grid.coordinate("y")].contiguous()


def randomise(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(0.3 * random(*parameter.shape, seed=100 + i))
    return module


def assert_same_step(
    stock: nn.Module, model: nn.Module, report: ff.Report, grid: Grid, seed: int = 0, **options: Any
) -> None:
    """Forward and backward of both on hidden features of shape (2, 5, hidden)."""
    full = random(2, 5, HIDDEN, seed=seed).requires_grad_()
    local = on_y(full.detach(), grid).requires_grad_()
    upstream = random(2, 5, HIDDEN, seed=seed + 1)
    for module in (stock, model):
        module.zero_grad()
    expected = stock(full, **options)
    expected.backward(upstream)
    output = model(local, **options)
    output.backward(on_y(upstream, grid))
    torch.testing.assert_close(output, on_y(expected, grid), rtol=1e-5, atol=1e-5)
    assert full.grad is not None
    torch.testing.assert_close(local.grad, on_y(full.grad, grid), rtol=1e-5, atol=1e-5)
    unused = [parameter for parameter in stock.parameters() if parameter.grad is None]
    for parameter in unused:
        parameter.grad = torch.zeros_like(parameter)
    for parameter in model.parameters():
        assert unused or parameter.grad is not None
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_shards_close(local_gradients(model), gradients(stock), report, grid, bar=1e-5)


# -- linears ------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, INNER, bias=bias)
        self.up = nn.Linear(HIDDEN, INNER, bias=bias)
        self.down = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.norm(hidden)
        return self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


class ClampingMlp(Mlp):
    """Modifies the outputs of its linears in place."""

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.norm(hidden)
        gate = self.gate(normal).clamp_(-0.4, 0.4)
        up = self.up(normal).mul_(3.0)
        return self.down(gate * up).add_(hidden)


MLP_ROLES = {"gate": "colwise", "up": "colwise", "down": "rowwise"}


def activation_traffic(entries: list[Any]) -> dict[str, tuple[int, int]]:
    return {e.axis: (e.calls, e.payload_bytes) for e in entries if e.purpose == "activation"}


def linears(shape: Shape) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    grid = Grid.create(shape)
    for stock in (Mlp(bias=True), Mlp(bias=False), ClampingMlp(bias=True), ClampingMlp(bias=False)):
        randomise(stock)
        model = copy.deepcopy(stock)
        report = ff.parallelize(model, grid, roles=MLP_ROLES)
        for seed in (0, 10):
            assert_same_step(stock, model, report, grid, seed)

    model = randomise(Mlp())
    ff.parallelize(model, grid, roles=MLP_ROLES)
    hidden = on_y(random(2, 5, HIDDEN), grid).requires_grad_()
    traffic = []
    for _ in range(2):
        with grid.collectives.counting() as forward:
            output = model(hidden)
        with grid.collectives.counting() as backward:
            output.sum().backward()
        traffic.append((activation_traffic(forward), activation_traffic(backward)))
    return traffic


@pytest.mark.parametrize("shape", GRIDS_OF_4)
def test_linears_are_exact_and_a_fused_group_has_one_all_reduce_in_each_direction(
    pool: RankPool, shape: Shape
) -> None:
    _, _, y, x = shape
    tokens, element_bytes = 2 * 5, 4
    gate_and_up = 2 * tokens * INNER // x * element_bytes
    down = tokens * HIDDEN // y * element_bytes
    forward = {"y": (1, gate_and_up), "x": (1, down)}
    # Backward sums the gradient of the input of `down` over y, and that of the shared input of `gate` and `up` over x.
    backward = {"y": (1, tokens * INNER // x * element_bytes), "x": (1, tokens * HIDDEN // y * element_bytes)}
    expected = tuple({a: e for a, e in way.items() if {"y": y, "x": x}[a] > 1} for way in (forward, backward))
    for traffic in pool.run(linears, 4, shape):
        assert traffic == [expected, expected]


class Siblings(nn.Module):
    """Three linears of one shape; ``reads`` says which of two inputs each reads, or "-" if it is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN)
        self.a = nn.Linear(HIDDEN, INNER, bias=False)
        self.b = nn.Linear(HIDDEN, INNER, bias=False)
        self.c = nn.Linear(HIDDEN, INNER, bias=False)
        self.out = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, hidden: Tensor, reads: str) -> Tensor:
        normal = self.norm(hidden)
        inputs = (normal, torch.sin(normal))
        total = torch.zeros(())
        for weight, (member, which) in enumerate(zip((self.a, self.b, self.c), reads, strict=True), start=1):
            if which != "-":
                total = total + weight * member(inputs[int(which)])
        return self.out(total)


SIBLING_ROLES = {"a": "colwise", "b": "colwise", "c": "colwise", "out": "rowwise"}


def siblings_of_several_inputs(shape: Shape, schedules: list[tuple[str, ...]]) -> None:
    grid = Grid.create(shape)
    for schedule in schedules:
        stock = randomise(Siblings())
        model = copy.deepcopy(stock)
        report = ff.parallelize(model, grid, roles=SIBLING_ROLES)
        for step, reads in enumerate(schedule):
            assert_same_step(stock, model, report, grid, seed=10 * step, reads=reads)


def test_linears_that_read_different_inputs_are_exact_in_every_forward(pool: RankPool) -> None:
    # All patterns of the first forward, which settles the groups, each followed by other patterns.
    firsts = ["".join(reads) for reads in itertools.product("01", repeat=3)] + ["0-0", "-01", "0--", "10-"]
    pool.run(siblings_of_several_inputs, 4, (1, 1, 2, 2), [(first, first, "001", "110") for first in firsts])
    pool.run(siblings_of_several_inputs, 4, (1, 1, 4, 1), [("010", "000"), ("0-1", "010")])


class InputChangedBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN)
        self.a = nn.Linear(HIDDEN, INNER)
        self.b = nn.Linear(HIDDEN, INNER)
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.norm(hidden)
        first = self.a(normal)
        normal.mul_(-2.0)
        return self.out(first + 3.0 * self.b(normal))


def without_gradients(shape: Shape) -> None:
    grid = Grid.create(shape)
    for kind in (Mlp, InputChangedBetween):
        stock = randomise(kind())
        model = copy.deepcopy(stock)
        roles = MLP_ROLES if kind is Mlp else {"a": "colwise", "b": "colwise", "out": "rowwise"}
        report = ff.parallelize(model, grid, roles=roles)
        # FSDP2 supports inference mode once it has its buffers, so not in the first forward.
        for seed, context in enumerate((torch.no_grad, torch.no_grad, torch.inference_mode, torch.no_grad)):
            hidden = random(2, 5, HIDDEN, seed=seed)
            with context():
                output, expected = model(on_y(hidden, grid)), on_y(stock(hidden), grid)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        if kind is Mlp:
            assert_same_step(stock, model, report, grid)


def test_evaluation_is_exact_also_if_an_input_changes_between_linears(pool: RankPool) -> None:
    pool.run(without_gradients, 4, (1, 1, 2, 2))


# -- norms --------------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(HIDDEN, eps=1e-5),
    "LayerNorm without bias": lambda: nn.LayerNorm(HIDDEN, eps=1e-3, bias=False),
    "nn.RMSNorm": lambda: nn.RMSNorm(HIDDEN, eps=1e-6),
    "Llama": lambda: LlamaRMSNorm(HIDDEN, eps=1e-2),
    "T5": lambda: T5LayerNorm(HIDDEN),
    "Gemma, 1 + w": lambda: Gemma2RMSNorm(HIDDEN, eps=1e-6),
}


def norm_step(norm: nn.Module, hidden: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    hidden = hidden.clone().requires_grad_()
    output = norm(hidden)
    output.backward(upstream.to(output.dtype))
    assert hidden.grad is not None
    return output.detach(), hidden.grad, gradients(norm)


def norms(shape: Shape) -> None:
    grid = Grid.create(shape)
    hidden, upstream = 2.0 * random(3, 7, HIDDEN) + 0.5, random(3, 7, HIDDEN, seed=1)
    for name, make in NORMS.items():
        stock = randomise(Normed(make()))
        expected, expected_hidden, expected_parameters = norm_step(stock, hidden, upstream)
        rounded = hidden.bfloat16()
        rough, rough_hidden, _ = norm_step(copy.deepcopy(stock).bfloat16(), rounded, upstream)
        for precision in ("fp32", "bf16"):
            model = copy.deepcopy(stock)
            report = ff.parallelize(model, grid, precision=precision)
            local = on_y(hidden if precision == "fp32" else rounded, grid).requires_grad_()
            output = model(local)
            output.backward(on_y(upstream, grid).to(output.dtype))
            found = local_gradients(model)

            def say(text: str, case: str = f"{name} in {precision}") -> str:
                return f"{case}: {text}"

            assert local.grad is not None
            if precision == "fp32":
                torch.testing.assert_close(output, on_y(expected, grid), rtol=1e-5, atol=1e-5, msg=say)
                torch.testing.assert_close(
                    local.grad, on_y(expected_hidden, grid), rtol=1e-5, atol=1e-5, msg=say
                )
                assert_shards_close(found, expected_parameters, report, grid, bar=1e-5)
            else:
                # One unit in the last of 8 bits, where fp32 statistics round differently.
                torch.testing.assert_close(output, on_y(rough, grid), rtol=2**-7, atol=1e-4, msg=say)
                torch.testing.assert_close(
                    local.grad, on_y(rough_hidden, grid), rtol=2**-5, atol=1e-2, msg=say
                )
                assert_shards_close(found, expected_parameters, report, grid, bar=2e-2)


def mean_of_a_thousand(shape: Shape) -> None:
    grid = Grid.create(shape)
    hidden, upstream = 1e3 + random(3, 7, HIDDEN), random(3, 7, HIDDEN, seed=1)
    stock = randomise(Normed(nn.LayerNorm(HIDDEN)))
    model = copy.deepcopy(stock)
    report = ff.parallelize(model, grid)
    exact = norm_step(stock.double(), hidden.double(), upstream.double())
    local = on_y(hidden, grid).requires_grad_()
    output = model(local)
    output.backward(on_y(upstream, grid))
    assert local.grad is not None
    # The fp32 resolution at 1000 is 3e-5. Mean square minus squared mean would have an error of 6e-2.
    torch.testing.assert_close(output.double(), on_y(exact[0], grid), rtol=0.0, atol=3e-4)
    torch.testing.assert_close(local.grad.double(), on_y(exact[1], grid), rtol=0.0, atol=3e-4)
    assert_shards_close(
        {k: v.double() for k, v in local_gradients(model).items()}, exact[2], report, grid, bar=3e-4
    )


@pytest.mark.parametrize("shape", GRIDS_OF_4)
def test_norms_use_the_statistics_of_all_features(pool: RankPool, shape: Shape) -> None:
    pool.run(norms, 4, shape)
    pool.run(mean_of_a_thousand, 4, shape)


# -- embedding ----------------------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self, rows: int, padding_idx: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, HIDDEN, padding_idx=padding_idx)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


def lookups(shape: Shape) -> None:
    grid = Grid.create(shape)
    for rows, padding_idx in ((10, None), (10, 7), (10, -10), (4, 1), (16, 15)):
        stock = randomise(Lookup(rows, padding_idx))
        model = copy.deepcopy(stock)
        report = ff.parallelize(model, grid)
        ids = torch.arange(3 * 8).reshape(3, 8) % rows
        upstream = random(3, 8, HIDDEN)
        expected = stock(ids)
        expected.backward(upstream)
        output = model(ids)
        output.backward(on_y(upstream, grid))
        torch.testing.assert_close(output, on_y(expected, grid), rtol=0.0, atol=0.0)
        assert_shards_close(local_gradients(model), gradients(stock), report, grid, bar=1e-6)


@pytest.mark.parametrize("shape", GRIDS_OF_4)
def test_embedding_with_few_rows_and_with_a_padding_row(pool: RankPool, shape: Shape) -> None:
    pool.run(lookups, 4, shape)


# -- parameters that the model's own code reads --------------------------------------------------------------------------


def apertus_step(shape: Shape) -> None:
    """Its activation function has two parameters, each with a role of its own."""
    stock, model = (tiny_model(find_family("apertus")) for _ in range(2))
    grid = Grid.create(shape)
    report = ff.parallelize(model, grid)
    ids = torch.randint(90, (4, 16), generator=torch.Generator().manual_seed(0))
    for each in (stock, model):
        each(input_ids=ids, labels=ids).loss.backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)


def test_several_parameters_of_a_stock_module_have_roles_of_their_own(pool: RankPool) -> None:
    pool.run(apertus_step, 2, (1, 1, 1, 2))
