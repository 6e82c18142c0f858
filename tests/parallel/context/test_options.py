"""Ranks that share sequences together with what else the engine does: exact, or refused by name."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from tests.models import build
from tests.parallel.context.test_model import LENGTH, assert_exact, documents, errors, sample, stock, train

nightly = pytest.mark.nightly
BY_TOKENS = {"activations": "sequence-parallel"}


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "fsdp2", "activation_checkpointing": "selective", **BY_TOKENS},
        {"activation_checkpointing": "full", **BY_TOKENS},
        pytest.param({"activation_checkpointing": "selective"}, marks=nightly),
        pytest.param({"activations": "replicated"}, marks=nightly),
        pytest.param({"chunked_loss": False}, marks=nightly),
        pytest.param({"overlap": ff.Overlap(interleave=False)}, marks=nightly),
        pytest.param({"weights": "fsdp2", "activation_checkpointing": "full"}, marks=nightly),
    ],
)
def test_options_of_the_engine_stay_exact(pool: RankPool, options: dict[str, Any]) -> None:
    assert_exact(pool.run(train, 4, (1, 2, 1, 2), 2, "llama", options))


@nightly
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 2, 1, 1)])
@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_other_grids_are_exact(pool: RankPool, shape: tuple[int, int, int, int], weights: str) -> None:
    assert_exact(pool.run(train, 4, shape, 2, "llama", {"weights": weights}))


@pytest.mark.parametrize(
    "kind",
    [
        "gemma2",  # a soft cap of the scores, sliding windows
        pytest.param("gpt2", marks=nightly),  # learned positions
        pytest.param("qwen3", marks=nightly),
        pytest.param("qwen3_moe", marks=nightly),
    ],
)
def test_other_models_are_exact(pool: RankPool, kind: str) -> None:
    assert_exact(pool.run(train, 4, (1, 2, 1, 2), 2, kind))


def is_interleaved() -> tuple[bool, bool]:
    """(are half-batches to alternate, did each gather the positions of its rows)."""
    grid = Grid.create((1, 2, 1, 2), sequence_ranks=2)
    ids, labels, positions = sample(2)
    model = build("llama")
    report = ff.parallelize(model, grid)
    inputs = ff.cut_sequences(ids, grid, labels=labels, position_ids=positions)
    with grid.collectives.counting() as entries:
        model(**inputs)
    calls = sum(e.calls for e in entries if e.purpose == "positions")
    return report.interleaved, calls >= 2


def test_half_batches_of_a_cut_batch_alternate(pool: RankPool) -> None:
    assert pool.run(is_interleaved, 4) == [(True, True)] * 4


def train_in_micro_batches(weights: str, accumulation: str) -> tuple[float, float]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    ids, labels, positions = sample(4)
    expected = stock("llama", ids, labels, positions)
    model = build("llama")
    report = ff.parallelize(model, grid, weights=weights, accumulation=accumulation)  # type: ignore[arg-type]
    inputs = ff.cut_sequences(ids, grid, labels=labels, position_ids=positions)
    count = ff.count_labels(inputs["shift_labels"], grid)
    total = torch.zeros(())
    for number in range(2):
        part = {name: tensor[2 * number : 2 * number + 2] for name, tensor in inputs.items()}
        with nullcontext() if number else ff.no_sync(model):
            loss = model(**part, num_items_in_batch=count).loss
            loss.backward()
        total += loss.detach()
    return errors(model, report, total, expected)


@pytest.mark.parametrize(
    ("weights", "accumulation"),
    [
        ("streamed", "sharded"),
        pytest.param("fsdp2", "whole", marks=nightly),
        pytest.param("fsdp2", "sharded", marks=nightly),
    ],
)
def test_micro_batches_are_those_of_one_batch(pool: RankPool, weights: str, accumulation: str) -> None:
    assert_exact(pool.run(train_in_micro_batches, 2, weights, accumulation))


def train_in_bf16() -> float:
    """The largest difference of a gradient from that of a grid that cuts no sequence, of its maximum."""
    ids, labels, positions = sample(2)
    found: list[dict[str, Tensor]] = []
    for share in (1, 2):
        grid = Grid.create((1, 2, 1, 1), sequence_ranks=share)
        model = build("llama", use_cache=False)
        ff.parallelize(model, grid, precision="bf16")
        own = grid.local_rows(2)
        inputs = ff.cut_sequences(ids[own], grid, labels=labels[own], position_ids=positions[own])
        model(**inputs).loss.backward()
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})  # type: ignore[union-attr]
    return max(float((found[1][n] - g).abs().max() / g.abs().max()) for n, g in found[0].items())


def test_bf16_differs_by_its_rounding_alone(pool: RankPool) -> None:
    worst = max(pool.run(train_in_bf16, 2))
    assert 0 < worst < 0.03


def train_adapters() -> float:
    """The same for adapters in fp32."""
    ids, labels, positions = sample(2)
    found: list[dict[str, Tensor]] = []
    for share in (1, 2):
        grid = Grid.create((1, 2, 1, 1), sequence_ranks=share)
        model = build("llama", use_cache=False)
        ff.parallelize(model, grid, lora=ff.Lora(4), seed=1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:  # B begins at 0, where the gradient of A is 0
                    parameter.add_(0.01)
        own = grid.local_rows(2)
        inputs = ff.cut_sequences(ids[own], grid, labels=labels[own], position_ids=positions[own])
        model(**inputs).loss.backward()
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad})  # type: ignore[union-attr]
    assert len(found[0]) == len(found[1]) > 0
    return max(float((found[1][n] - g).abs().max() / g.abs().max()) for n, g in found[0].items())


def test_adapters_are_exact(pool: RankPool) -> None:
    assert max(pool.run(train_adapters, 2)) < 1e-4


def changes_by_document(kind: str, share: int) -> list[float]:
    """For each document, the largest change of logits outside of it while its tokens change."""
    grid = Grid.create((1, share, 1, 1), sequence_ranks=share)
    ids, _, positions = sample(4)
    model = build(kind)
    ff.parallelize(model, grid)
    numbers, found = documents(4), []
    with torch.no_grad():
        for document in range(1, 5):
            is_in = numbers == document
            cut = [
                ff.cut_sequences(given, grid, position_ids=positions)
                for given in (ids, torch.where(is_in, (ids + 7) % 131, ids))
            ]
            first, second = (model(**own).logits for own in cut)
            outside = cut[0]["input_ids"] == cut[1]["input_ids"]
            inside = (first - second)[~outside].abs()
            assert not inside.numel() or float(inside.max()) > 1e-3
            found.append(float((first - second)[outside].abs().max()))
    return found


@pytest.mark.parametrize(
    ("kind", "share"), [("llama", 2), ("gemma2", 2), pytest.param("llama", 4, marks=nightly)]
)
def test_a_document_changes_no_other(pool: RankPool, kind: str, share: int) -> None:
    assert all(
        change == 0.0 for found in pool.run(changes_by_document, share, kind, share) for change in found
    )


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("llama", {"compile": True}, "compile=True with sequence_ranks=2 is not supported"),
    (
        "llama",
        {"float8": "rowwise_with_gw_hp", "precision": "bf16"},
        "float8='rowwise_with_gw_hp' with sequence_ranks=2",
    ),
    ("llama", {"activation_offloading": True}, "activation_offloading=True with sequence_ranks=2"),
    (
        "gpt_neox_japanese",
        {},
        "GPTNeoXJapaneseForCausalLM cannot share sequences.*does not use transformers' attention interface",
    ),
)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def refusals() -> list[str]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    found = []
    for kind, options, _ in REFUSED:
        try:
            ff.parallelize(build(kind), grid, **options)
        except ff.UnsupportedError as error:
            found.append(str(error))
    try:
        ff.parallelize(build("llama", rope_parameters=DYNAMIC), grid)
    except ff.UnsupportedError as error:
        found.append(str(error))
    try:
        ff.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), grid)
    except ff.UnsupportedError as error:
        found.append(str(error))
    return found


def test_what_is_not_supported_is_refused_by_name(pool: RankPool) -> None:
    words = [words for *_, words in REFUSED]
    words += [r"rotations \(dynamic\) depend on the longest position", "Sequential cannot share sequences"]
    for found in pool.run(refusals, 2):
        assert len(found) == len(words), found
        for said, expected in zip(found, words, strict=True):
            assert re.search(expected, said), said


def wrong_batches() -> list[str]:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    ids, labels, positions = sample(2)
    model = build("llama")
    ff.parallelize(model, grid)
    cut = ff.cut_sequences(ids, grid, labels=labels, position_ids=positions)
    whole = torch.arange(LENGTH).expand(2, -1)
    found = []
    for given in (
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "position_ids": whole},
        {"input_ids": cut["input_ids"], "position_ids": cut["position_ids"], "labels": cut["labels"]},
        cut | {"attention_mask": torch.ones_like(cut["input_ids"])},
    ):
        try:
            model(**given)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    others = ff.cut_sequences(ids.roll(grid.coordinate("z"), 0), grid)  # each rank reads other rows
    try:
        model(**others)
    except ValueError as error:
        found.append(str(error))
    try:
        model.model(input_ids=cut["input_ids"], position_ids=cut["position_ids"])
    except ff.UnsupportedError as error:
        found.append(str(error))
    return found


def test_a_batch_that_is_not_cut_is_refused(pool: RankPool) -> None:
    for found in pool.run(wrong_batches, 2):
        begins = (
            "sequence_ranks=2 needs input_ids and position_ids",
            "the positions of the 2 ranks",
            "labels are shifted before",
            "attention_mask is not",
            "the 2 ranks that share sequences cut different rows",
            "a part of a model",
        )
        assert all(said.startswith(begin) for said, begin in zip(found, begins, strict=True)), found
        assert all("fourfold.cut_sequences" in said for said in found[:-2])
