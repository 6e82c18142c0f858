"""Streamed weights with unusual models: changing order of blocks, tied weights, hidden outputs."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from tests.models import assert_shards_close, gradients, local_gradients
from tests.streamed import ONLY_Z, Pair, Shape, gathered, overlap

# -- other models -------------------------------------------------------------------------------------------------------

HIDDEN, INNER = 16, 24


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class AnyOrder(nn.Module):
    """Runs its blocks in the given order."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        if tied:
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.blocks[2].down.bias = self.blocks[1].down.bias

    def forward(self, hidden: Tensor, order: tuple[int, ...]) -> Tensor:
        hidden = self.norm(hidden)
        for i in order:
            hidden = hidden + self.blocks[i](hidden)
        return hidden


ROLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PREFETCH = 2


def train_in_orders(
    shape: Shape, orders: list[tuple[int, ...]], tied: bool, checkpointing: Any
) -> list[tuple[str, list[str]]]:
    """Compare each step with one process; returns each use of a matrix in the last forward, and the gathers before it."""
    grid = Grid.create(shape)
    torch.manual_seed(0)
    stock = AnyOrder(tied=tied)
    # Matrices have at least 768 bytes, biases at most 96.
    pair = Pair(
        stock,
        grid,
        overlap(bundle_bytes=128, prefetch=PREFETCH),
        roles=ROLES if grid.x > 1 else None,
        activation_checkpointing=checkpointing,
    )
    rows = grid.local_rows(8)
    uses: list[tuple[str, list[str]]] = []

    def see(name: str) -> None:
        gathers = [f.module for f in flights if f.purpose == "weight" and f.module != "small weights"]
        uses.append((name, gathers))

    for name, module in pair.model.named_modules():
        if name.endswith(("up", "down")):
            module.register_forward_pre_hook(lambda m, a, name=name: see(f"{name}.weight"))
    for step, order in enumerate(orders):
        hidden, upstream = (
            torch.randn(8, 5, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in (step, 99)
        )
        pair.zero_grad()
        uses.clear()
        with grid.collectives.recording() as flights:
            output = pair.model(hidden[rows], order)
        in_forward = list(uses)
        output.backward(upstream[rows])
        expected = stock(hidden, order)
        expected.backward(upstream)
        torch.testing.assert_close(output, expected[rows], rtol=1e-5, atol=1e-5)
        for model in (pair.stock, pair.model):
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        pair.assert_gradients()
        assert not gathered(pair.model)
    return in_forward


@pytest.mark.parametrize(("shape", "checkpointing"), [((1, 2, 1, 2), "none"), ((2, 2, 1, 1), "full")])
def test_a_changing_order_of_blocks_is_exact(pool: RankPool, shape: Shape, checkpointing: str) -> None:
    orders: list[tuple[int, ...]] = [
        (0, 1, 2),
        (0, 1, 2),
        (2, 1, 0),
        (0, 2),
        (0, 2),
        (1,),
        (0, 1, 2),
        (0, 0, 1, 2, 1),
        (2, 1, 0),
    ]
    pool.run(train_in_orders, 4, shape, orders, False, checkpointing)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 1), (0, 1, 2)),
        ((0, 1, 2), (2, 1, 0)),
    ],
)
def test_a_new_order_is_recorded(pool: RankPool, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    in_order = [f"blocks.{i}.{part}.weight" for i in after for part in ("up", "down")]
    for uses in pool.run(train_in_orders, 2, ONLY_Z, [before] * 2 + [after] * 4, False, "none"):
        assert [name for name, _ in uses] == in_order
        for i, (_, gathers) in enumerate(uses):
            ahead = min(i + PREFETCH, len(in_order))
            assert gathers[: len(in_order)] == in_order[:ahead]


@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (2, 2, 1, 1)])
def test_a_weight_tied_across_blocks_is_exact(pool: RankPool, shape: Shape) -> None:
    pool.run(train_in_orders, 4, shape, [(0, 1, 2), (0, 1, 2), (2, 0, 1), (0, 1)], True, "none")


# -- unusual modules ----------------------------------------------------------------------------------


@dataclass
class Box:
    """An output in which hooks do not find the tensor."""

    inside: Tensor


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_parameter("weight", nn.Parameter(torch.randn(32, 32)))

    def forward(self, x: Tensor) -> Box:
        return Box(self.linear(x) @ self.weight)


class Odd(nn.Module):
    """A boxed output in the middle; around it a table that its module looks up and the model multiplies with."""

    def __init__(self, lookup_first: bool) -> None:
        super().__init__()
        self.table, self.boxing = nn.Embedding(64, 32), Boxing()
        self.lookup_first = lookup_first

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        if self.lookup_first:
            h = self.boxing(self.table(ids) + x).inside
            return nn.functional.linear(h, self.table.weight).square().mean(dim=(1, 2)).sum()
        h = nn.functional.linear(x, self.table.weight.t() @ self.table.weight)
        return (self.boxing(h).inside * self.table(ids)).square().mean(dim=(1, 2)).sum()


def train_an_odd_model(lookup_first: bool) -> int:
    grid = Grid.create(ONLY_Z)
    torch.manual_seed(0)
    stock, ids, x = Odd(lookup_first), torch.randint(64, (4, 5)), torch.randn(4, 5, 32)
    model = copy.deepcopy(stock)
    report = ff.parallelize(model, grid, weights="streamed", overlap=overlap())
    rows = grid.local_rows(4)
    for _ in range(3):
        stock.zero_grad()
        model.zero_grad()
        stock(ids, x).backward()
        model(ids[rows], x[rows]).backward()
        assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    return len(gathered(model))


@pytest.mark.parametrize("lookup_first", [True, False])
def test_weights_without_a_backward_hook_stay_until_backward(pool: RankPool, lookup_first: bool) -> None:
    assert pool.run(train_an_odd_model, 2, lookup_first) == [0, 0]
