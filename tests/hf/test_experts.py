"""How experts of several families are stored, and which part of them each rank has."""

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from benchmarks.tiny_models import find_family, tiny_model
from fourfold.errors import UnsupportedError
from fourfold.hf.experts import beside_all_experts, storage_of
from fourfold.hf.parameter_layout import ParameterLayout, describe
from fourfold.mesh.grid import Grid

EVERY_AXIS = {"data": 1, "z": 2, "y": 2, "x": 3}


def experts_of(family: str) -> tuple[str, nn.Module]:
    model = tiny_model(find_family(family))
    return next((n, m) for n, m in model.named_modules() if n.endswith(".experts"))


@pytest.mark.parametrize(
    ("family", "inner", "halved"),
    [
        ("qwen3_moe", {"gate_up_proj": 1, "down_proj": 2}, {"gate_up_proj"}),
        ("aria", {"gate_up_proj": 2, "down_proj": 1}, {"gate_up_proj"}),
        # Gate and up are interleaved.
        ("gpt_oss", {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}, set()),
    ],
)
def test_storage(family: str, inner: dict[str, int], halved: set[str]) -> None:
    name, module = experts_of(family)
    storage = storage_of(module, name)
    assert (dict(storage.inner), storage.halved) == (inner, halved)
    for key, dim in inner.items():
        assert module._parameters[key].shape[dim] in (storage.features, 2 * storage.features)  # type: ignore[union-attr]
    assert storage.of_output == ({"down_proj_bias"} if family == "gpt_oss" else set())


def test_what_stands_beside_experts() -> None:
    model = tiny_model(find_family("qwen2_moe"))
    found = beside_all_experts(model)
    assert set(found.values()) == {"router", "gate"}
    assert found["model.layers.1.mlp.gate"] == "router"
    assert found["model.layers.1.mlp.shared_expert_gate"] == "gate"


def test_experts_whose_storage_is_not_known() -> None:
    with pytest.raises(
        UnsupportedError, match=r"moe is a Linear without .* how it stores experts is not known"
    ):
        storage_of(nn.Linear(2, 2), "moe")
    name, module = experts_of("qwen3_moe")
    module.scale = nn.Parameter(torch.ones(4))
    with pytest.raises(UnsupportedError, match=r"scale is a parameter of experts of shape \(4,\)"):
        storage_of(module, name)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "experts", [4, 3]
)  # z divides 4; of 3 one z rank has the gates, the other the ups, or they share hidden features
def test_ranks_have_each_entry_of_both_halves_once(experts: int, transposed: bool) -> None:
    features, hidden = 12, 4
    shape = (experts, hidden, 2 * features) if transposed else (experts, 2 * features, hidden)
    whole = torch.arange(float(math.prod(shape))).view(shape)
    dim = 2 if transposed else 1
    layout = ParameterLayout.halves("experts.gate_up_proj", whole, dim, {"x": dim + 1, "y": dim + 1})
    assert f"dim {dim + 1} on y and x" in describe([layout])
    grid = cast(Grid, SimpleNamespace(size=EVERY_AXIS.__getitem__, z=EVERY_AXIS["z"]))
    count = torch.zeros_like(whole)
    for place in itertools.product(*map(range, EVERY_AXIS.values())):
        rank: Any = dict(zip(EVERY_AXIS, place, strict=True))
        index = layout.shard(grid, rank)
        local = layout.of(whole, index)
        if local.shape[dim] == 2:
            gate, up = local.unbind(dim)
            first_up = whole.select(dim, features).flatten()[0]
            # The same features of both: the up of a gate is in the other half, at the same place.
            assert torch.equal(up - gate, torch.full_like(gate, first_up.item()))
        for part, box in layout.boxes(index):
            assert torch.equal(local[part], whole[box])
            count[box] += 1
        # y is the outer axis, as DTensor orders two axes on one dim.
        assert index[dim + 1].start == features // 6 * (3 * rank["y"] + rank["x"])
    assert torch.equal(count, torch.ones_like(whole))
