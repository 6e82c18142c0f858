"""A model without its adapters is the reference of a preference loss: between a forward with them and its backward."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid, Lora
from fourfold.parallel import compiled
from fourfold.parallel.linear import without_adapters
from fourfold.parallel.lora import is_adapter
from tests.models import VOCABULARY, assert_shards_close, batch, build
from tests.parallel.test_lora import LORA, adapt, local, write_adapter

Shape = tuple[int, int, int, int]


def of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, found, 0.0)


def preference(policy: Tensor, reference: Tensor, rows: int) -> Tensor:
    return -nn.functional.logsigmoid((policy - reference).sum(-1)).sum() / rows


def steps_with_a_reference(shape: Shape, folder: Path, options: dict[str, Any]) -> None:
    stock, base, model, grid = build("llama"), build("llama"), build("llama"), Grid.create(shape)
    placed = adapt(stock)
    ids, given = batch(4)
    labels = nn.functional.pad(given, (0, 1), value=-100)[:, 1:]
    wanted = of_labels(stock(input_ids=ids).logits, labels)
    expected = of_labels(base(input_ids=ids).logits, labels).detach()
    assert (wanted - expected).abs().max() > 1e-2
    preference(wanted, expected, 4).backward()
    gradients = {name: p.grad for name, p in placed.items() if p.grad is not None}

    compiled.BACKEND = "aot_eager"
    report = ff.parallelize(model, grid, lora=Lora(LORA.rank, LORA.alpha, adapter=folder), **options)
    layouts = {name: at for name, at in report.layouts.items() if is_adapter(at.hf_name)}
    of_adapters = ff.Report(report.model, grid, (), (), layouts)
    rows = grid.local_rows(4)

    def scores() -> Tensor:
        logits = model(input_ids=ids[rows]).logits
        return ff.token_log_probs(logits, labels[rows], grid, vocab_size=VOCABULARY)

    for _ in range(3):  # the first is not compiled, and finds the order of weights
        model.zero_grad()
        found = scores()
        with without_adapters(model):
            reference = scores()
        assert not reference.requires_grad
        torch.testing.assert_close(found, wanted[rows].detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(reference, expected[rows], rtol=1e-5, atol=1e-5)
        preference(found, reference, 4).backward()
        assert_shards_close(local(model, report, "gradients"), gradients, of_adapters, grid)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 2, 2), {"weights": "streamed", "overlap": ff.Overlap(interleave=True)}),
        ((1, 2, 1, 2), {"weights": "fsdp2", "activation_checkpointing": "selective"}),
        ((2, 1, 2, 1), {"weights": "streamed", "activation_checkpointing": "full"}),
        pytest.param((1, 1, 2, 2), {"weights": "fsdp2", "compile": True}, marks=pytest.mark.nightly),
    ],
)
def test_a_reference_without_adapters_is_exact(
    pool: RankPool, tmp_path: Path, shape: Shape, options: dict[str, Any]
) -> None:
    folder = write_adapter(tmp_path / "adapter", "llama")
    pool.run(steps_with_a_reference, math.prod(shape), shape, folder, options)


def frozen(weights: Any) -> tuple[set[torch.dtype], bool]:
    """The dtypes of a model that is frozen before it is parallel, and whether its loss is that of the stock model in bf16."""
    model, stock = build("llama").requires_grad_(False), build("llama").to(torch.bfloat16)
    ids, labels = batch(4)
    ff.parallelize(model, Grid.create((1, 2, 1, 1)), precision="bf16", weights=weights)
    with torch.no_grad():
        rows = Grid.create((1, 2, 1, 1)).local_rows(4)
        found = model(input_ids=ids[rows], labels=labels[rows]).loss
        is_close = abs(float(found) - float(stock(input_ids=ids, labels=labels).loss)) < 2e-2
    return {p.dtype for p in model.parameters()}, is_close


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_a_frozen_model_needs_no_fp32_master(pool: RankPool, weights: str) -> None:
    assert pool.run(frozen, 2, weights) == [({torch.bfloat16}, True)] * 2
