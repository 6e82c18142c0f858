"""Dropout of adapters: steps are those of one process with the same masks; masks are equal where ranks read the same, and drawn again alike."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
import fourfold.parallel.product.linear_op as linear_op
from benchmarks.ranks import RankPool
from fourfold import Grid, Lora, UnsupportedError
from fourfold.mesh.axes import AXES
from fourfold.parallel.linear import Linear4D
from fourfold.parallel.lora import is_adapter
from tests.models import assert_shards_close, batch, build
from tests.parallel.test_lora import LORA, Shape, linears, local, values, write_adapter

RATE = 0.3
Masks = dict[str, Tensor]


class Masked(nn.Module):
    """A linear with an adapter whose input is multiplied by a mask of all tokens."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.base, self.mask = base, mask
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, input: Tensor) -> Tensor:
        read = input * self.mask.view_as(input)
        return self.base(input) + LORA.scale * (read @ self.a.t()) @ self.b.t()


def in_one_process(kind: str, masks: Masks) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients of adapters) of the stock model."""
    model = build(kind).requires_grad_(False)
    given, placed = values(model), {}
    for name in linears(model):
        parent, _, key = name.rpartition(".")
        a, b = given[f"{name}.lora_A.weight"], given[f"{name}.lora_B.weight"]
        masked = Masked(model.get_submodule(name), a, b, masks[name])
        setattr(model.get_submodule(parent), key, masked)
        placed |= {f"{name}.lora_A.weight": masked.a, f"{name}.lora_B.weight": masked.b}
    ids, labels = batch(4)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in placed.items()}  # type: ignore[misc]


def own_masks(model: nn.Module, grid: Grid, step: int) -> tuple[float, Masks]:
    """(loss, the mask that each linear's adapter had in a step, [tokens, features] of this rank), drawn alike each time."""
    seen: dict[int, list[Tensor]] = defaultdict(list)
    mask = linear_op.mask

    def recorded(adapter: Any, *given: Any) -> Tensor | None:
        if (kept := mask(adapter, *given)) is not None:
            seen[id(adapter)].append(kept.clone())
        return kept

    every, labels = batch(4)
    rows = grid.local_rows(4)
    linear_op.mask = recorded  # type: ignore[attr-defined]
    try:
        ff.seed_ranks(grid, 3, step)
        loss = model(input_ids=every[rows], labels=labels[rows]).loss
        loss.backward()
    finally:
        linear_op.mask = mask  # type: ignore[attr-defined]
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear4D) and module.adapter_scale is not None:
            product = module.group._product
            assert product is not None
            first, *others = seen[id(product.adapters[module.group.members.index(module)])]
            # Of the gradients of A and B, and of that of the input, which the first block does not need.
            assert len(others) >= (1 if ".0." in name else 2)
            assert all(torch.equal(first, other) for other in others), name
            found[name] = first.transpose(0, 1).flatten(1)
    return loss.item(), found


def whole_masks(model: nn.Module, grid: Grid, own: Masks) -> Masks:
    """Those of all tokens and features; ranks that read the same part have to have the same mask."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ({axis: grid.coordinate(axis) for axis in AXES}, own))
    whole = {}
    for name in own:
        in_axis = model.get_submodule(name).group.in_axis
        parts: dict[tuple[int, int], Tensor] = {}
        for place, masks in every:
            key = (place["data"] * grid.z + place["z"], 0 if in_axis is None else place[in_axis])
            assert torch.equal(parts.setdefault(key, masks[name]), masks[name]), name
        different = [part for part in parts.values() if part.shape == next(iter(parts.values())).shape]
        assert not any(torch.equal(a, b) for i, a in enumerate(different) for b in different[:i]), name
        batches = sorted({key[0] for key in parts})
        features = sorted({key[1] for key in parts})
        whole[name] = torch.cat([torch.cat([parts[b, f] for f in features], dim=1) for b in batches])
    return whole


def on_grid(kind: str, shape: Shape, folder: Path, **options: Any) -> None:
    model, grid = build(kind), Grid.create(shape)
    lora = Lora(LORA.rank, LORA.alpha, dropout=RATE, adapter=folder)
    report = ff.parallelize(model, grid, lora=lora, **options)
    rows = grid.local_rows(4)
    with torch.no_grad():  # which linears share an input shows in the first forward
        model(input_ids=batch(4)[0][rows])
    loss, own = own_masks(model, grid, 0)
    masks = whole_masks(model, grid, own)
    wanted, gradients = in_one_process(kind, masks)
    assert loss == pytest.approx(wanted, rel=1e-5)
    layouts = {name: at for name, at in report.layouts.items() if is_adapter(at.hf_name)}
    of_adapters = ff.Report(report.model, grid, (), (), layouts)
    assert_shards_close(local(model, report, "gradients"), gradients, of_adapters, grid)

    every = torch.cat([mask.flatten() for mask in masks.values()])
    assert set(every.tolist()) == {0.0, torch.ones(()).div(1 - RATE).item()}
    spread = math.sqrt(RATE * (1 - RATE) / every.numel())
    assert abs((every == 0).float().mean().item() - RATE) < 5 * spread
    layer = "model.layers.0.self_attn."
    assert not torch.equal(masks[f"{layer}q_proj"], masks[f"{layer}k_proj"])
    _, again = own_masks(model, grid, 0)
    _, later = own_masks(model, grid, 1)
    for name, mask in own.items():
        assert torch.equal(mask, again[name])
        assert not torch.equal(mask, later[name])

    model.eval()
    plain = build(kind)
    # Not in halves, as with dropout: the logits of a rank's tokens would be those of others.
    whole = options | {"overlap": ff.Overlap(interleave=False)}
    ff.parallelize(plain, grid, lora=Lora(LORA.rank, LORA.alpha, adapter=folder), **whole)
    with torch.no_grad():
        ids = batch(4)[0][rows]
        torch.testing.assert_close(
            model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 1, 1), {}),
        ((1, 1, 2, 2), {"weights": "streamed", "activation_checkpointing": "selective"}),
        ((1, 2, 1, 2), {"weights": "fsdp2", "activation_checkpointing": "full"}),
        ((1, 1, 2, 2), {"weights": "fsdp2", "activations": "replicated"}),
    ],
)
def test_steps_equal_those_of_one_process_with_these_masks(
    pool: RankPool, tmp_path: Path, shape: Shape, options: dict[str, Any]
) -> None:
    pool.run(
        on_grid, math.prod(shape), "llama", shape, write_adapter(tmp_path / "adapter", "llama"), **options
    )


def refused() -> None:
    grid = Grid.create((1, 1, 1, 1))
    with pytest.raises(UnsupportedError, match=r"adapters have dropout, .* use compile=False"):
        ff.parallelize(build("llama"), grid, lora=Lora(dropout=0.1), compile=True)
    with pytest.raises(ValueError, match="has to be at least 0 and below 1"):
        Lora(dropout=1.0)
    assert Lora.of_config(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"]}
    ) == Lora(4, 8, ("q_proj",), dropout=0.1)


def test_what_is_not_supported_is_refused(pool: RankPool) -> None:
    pool.run(refused, 1)
