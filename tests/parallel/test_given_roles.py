"""A role of an unsharded parameter that does not fit how ranks use it is rejected by its first gradient."""

import runpy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold.errors import UnsupportedError
from tests.documented import ROOT


def train(shape: tuple[int, int, int, int], where: str, role: str, norm: str = "LayerNorm") -> str:
    """The error of a step of the example's model with a scalar for its hidden features, or for those of its MLP."""
    names = runpy.run_path(str(ROOT / "examples/custom_module.py"))

    class Block(names["Block"]):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.first = getattr(nn, norm)(names["HIDDEN"])

        def forward(self, hidden: Tensor) -> Tensor:
            scale = {name: self.scale if name == where else 1.0 for name in ("hidden", "inner")}
            hidden = hidden + scale["hidden"] * self.attention(self.first(hidden))
            return hidden + self.down(F.gelu(scale["inner"] * self.up(self.second(hidden))))

    names["Model"].__init__.__globals__["Block"] = Block
    torch.manual_seed(0)  # the same weights on all ranks
    model, grid = names["Model"](), ff.Grid.create(shape)
    ff.parallelize(model, grid, roles={**names["ROLES"], "blocks.*.scale": role})
    ids = torch.randint(500, (4, names["LENGTH"]), generator=torch.Generator().manual_seed(0))
    try:
        for _ in range(2):
            ff.cross_entropy(model(ids)[:, :-1], ids[:, 1:], grid).backward()
    except UnsupportedError as error:
        return str(error)
    return ""


SUMMED = "replicated_with_grad_allreduce"


@pytest.mark.parametrize(
    ("shape", "where", "role", "error"),
    [
        ((1, 1, 1, 2), "hidden", "replicated", ""),
        ((1, 1, 1, 2), "inner", SUMMED, ""),
        ((1, 1, 2, 1), "inner", "replicated", ""),
        ((1, 1, 1, 2), "inner", "replicated", f"differs between the x=2 ranks, and is not summed over them; give it the role '{SUMMED}'"),
        ((1, 1, 1, 2), "hidden", SUMMED, "is the same on the x=2 ranks, and would be summed over them; give it the role 'replicated'"),
        ((1, 1, 2, 1), "hidden", "replicated", "differs between the y=2 ranks, and is not summed over them; use y=1"),
    ],
)  # fmt: skip
def test_a_role_that_does_not_fit_is_rejected(
    pool: RankPool, shape: tuple[int, int, int, int], where: str, role: str, error: str
) -> None:
    for said in pool.run(train, 2, shape, where, role):
        assert said.endswith(error)
        assert bool(said) == bool(error)
        if error:
            assert said.startswith(f"blocks.1.scale has the role '{role}'")


def test_a_norm_without_an_epsilon_of_its_own(pool: RankPool) -> None:
    assert pool.run(train, 2, (1, 1, 2, 1), "inner", "replicated", "RMSNorm") == ["", ""]
