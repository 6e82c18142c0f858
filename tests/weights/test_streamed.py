"""Streamed weights: the results of one process and the storage of FSDP2, for various models."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.mesh.axes import AXES
from fourfold.weights.api import read_weight
from tests.models import (
    batch,
    build,
    local_gradients,
    local_parameters,
    part,
)
from tests.streamed import BUNDLE_BYTES, ONLY_Z, PLENTY, Pair, Shape, gathered, overlap, train

# -- storage ------------------------------------------------------------------------------------------------------------


def compare_storage(shape: Shape, kind: str, changes: dict[str, Any]) -> int:
    grid = Grid.create(shape)
    streamed, fsdp2 = build(kind, **changes), build(kind, **changes)
    report = ff.parallelize(streamed, grid, weights="streamed", overlap=overlap())
    expected_report = ff.parallelize(fsdp2, grid, weights="fsdp2")
    assert report.layouts == expected_report.layouts
    expected = dict(fsdp2.named_parameters())
    assert [name for name, _ in streamed.named_parameters()] == list(expected)
    full = dict(build(kind, **changes).named_parameters())
    uneven = 0
    for name, parameter in streamed.named_parameters():
        assert parameter.shape == expected[name].shape
        if grid.x * grid.y == 1:  # FSDP2 alone: its DTensors are on the z mesh
            assert expected[name].device_mesh == grid.mesh["z"]
            assert expected[name].placements == (parameter.placements[AXES.index("z")],)
        else:
            assert expected[name].device_mesh == parameter.device_mesh
            assert expected[name].placements == parameter.placements
        assert torch.equal(parameter.to_local(), expected[name].to_local())
        assert torch.equal(parameter.to_local(), part(full, report, grid, name))
        sizes = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor(parameter.to_local().numel()))
        uneven += len({int(size) for size in sizes}) > 1
    return uneven


@pytest.mark.parametrize(
    ("kind", "shape", "changes"),
    [
        ("llama", (1, 2, 2, 2), {}),
        ("gpt2", (2, 2, 1, 2), {"vocab_size": 11}),
        ("llama", (1, 3, 1, 1), {"hidden_size": 20, "num_attention_heads": 2, "vocab_size": 11}),
        ("llama", (1, 4, 1, 1), {"vocab_size": 5}),  # rows 2, 2, 1 and 0
        ("qwen3_moe", (1, 4, 1, 1), {"num_experts": 2}),  # two experts: each rank has a part of both
    ],
)
def test_parameters_are_stored_as_fsdp2_stores_them(
    pool: RankPool, kind: str, shape: Shape, changes: dict[str, Any]
) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    assert min(pool.run(compare_storage, ranks, shape, kind, changes)) > 0


def save_and_load(folder: str, first: Any, second: Any) -> None:
    grid = Grid.create((1, 2, 1, 2))
    ids, labels = batch(8)
    rows = grid.local_rows(len(ids))
    models = []
    for weights, factor in ((first, 1.0), (second, 3.0)):
        model = build("llama", vocab_size=139)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        ff.parallelize(model, grid, weights=weights, overlap=overlap())
        models.append(model)
    losses = [model(input_ids=ids[rows], labels=labels[rows]).loss.item() for model in models]
    dcp.save({"model": models[0].state_dict()}, checkpoint_id=folder)
    dcp.load({"model": models[1].state_dict()}, checkpoint_id=folder)
    saved = local_parameters(models[0])
    for name, parameter in local_parameters(models[1]).items():
        assert torch.equal(parameter, saved[name])
    loss = models[1](input_ids=ids[rows], labels=labels[rows]).loss.item()
    assert loss == pytest.approx(losses[0], rel=1e-6)
    assert losses[1] != pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(("first", "second"), [("fsdp2", "streamed"), ("streamed", "fsdp2")])
def test_a_checkpoint_of_one_back_end_is_read_by_the_other(
    pool: RankPool, tmp_path: Path, first: str, second: str
) -> None:
    pool.run(save_and_load, 4, str(tmp_path), first, second)


# -- exactness ----------------------------------------------------------------------------------------------------------


def uneven_steps(shape: Shape, kind: str, changes: dict[str, Any], checkpointing: Any) -> None:
    grid = Grid.create(shape)
    for bundle_bytes in (0, BUNDLE_BYTES, PLENTY):
        pair = Pair(
            build(kind, **changes),
            grid,
            overlap(bundle_bytes=bundle_bytes),
            vocabulary=changes["vocab_size"],
            activation_checkpointing=checkpointing,
        )
        for seed in (2, 3, 4):
            pair.assert_exact_step(seed)
            assert not gathered(pair.model)
            pair.change_weights()


@pytest.mark.parametrize(
    ("kind", "shape", "changes", "checkpointing"),
    [
        (
            "llama",
            (1, 4, 1, 1),
            {"hidden_size": 20, "num_attention_heads": 2, "intermediate_size": 22, "vocab_size": 5},
            "none",
        ),
        pytest.param("llama", (1, 2, 1, 2), {"vocab_size": 11}, "full", marks=pytest.mark.nightly),
        pytest.param("gpt2", (2, 2, 1, 1), {"vocab_size": 11}, "full", marks=pytest.mark.nightly),
        ("gpt2", (1, 2, 2, 1), {"vocab_size": 11}, "none"),
    ],
)
def test_rows_that_z_does_not_divide_are_exact_for_any_bundle_size(
    pool: RankPool, kind: str, shape: Shape, changes: dict[str, Any], checkpointing: str
) -> None:
    pool.run(uneven_steps, 4, shape, kind, changes, checkpointing)


def without_gradients() -> None:
    pair = Pair(build("llama"), Grid.create((1, 2, 1, 2)), overlap(keep_bytes=PLENTY))
    for mode, seed in ((torch.no_grad, 5), (torch.inference_mode, 6)):
        pair.assert_exact_step(seed)
        pair.change_weights()
        with mode():
            torch.testing.assert_close(pair.loss(seed), pair.stock_loss(seed), rtol=1e-5, atol=0.0)
        assert not gathered(pair.model)
        pair.assert_exact_step(seed + 2)


def test_evaluation_between_steps_is_exact_and_frees_its_weights(pool: RankPool) -> None:
    pool.run(without_gradients, 4)


def call_parts_alone(options: dict[str, Any]) -> None:
    pair = Pair(build("llama"), Grid.create(ONLY_Z), overlap(**options))
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    # The first call may prefetch what the second one reads.
    calls = (("model.layers.0.mlp", "lm_head"), ("model.layers.1.self_attn.o_proj", "model.norm", "lm_head"))
    for seed in (2, 3, 4):
        pair.assert_exact_step(seed)
        for names, mode in itertools.product(calls, (torch.no_grad, torch.enable_grad)):
            pair.change_weights()
            with mode():
                for name in names:
                    ours = pair.model.get_submodule(name)(hidden)
                    expected = pair.stock.get_submodule(name)(hidden)
                    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 4},
        {"prefetch": 0, "keep_bytes": PLENTY},
    ],
)
def test_a_part_called_alone_uses_the_current_weights(pool: RankPool, options: dict[str, Any]) -> None:
    pool.run(call_parts_alone, 2, options)


def backward_through_a_part() -> None:
    pair = Pair(build("llama"), Grid.create(ONLY_Z))
    hidden = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(0))
    rows = pair.grid.local_rows(len(hidden))
    pair.assert_exact_step(2)
    pair.change_weights()
    pair.zero_grad()
    name = "model.layers.1.mlp"
    pair.model.get_submodule(name)(hidden[rows]).square().sum().backward()
    pair.stock.get_submodule(name)(hidden).square().sum().backward()
    used = 0
    for key, parameter in pair.model.named_parameters():
        expected = pair.stock.get_parameter(key).grad
        assert (parameter.grad is None) == (expected is None), key
        if expected is not None:
            used += 1
            ours = part({key: expected}, pair.report, pair.grid, key)
            torch.testing.assert_close(parameter.grad.to_local(), ours, rtol=1e-4, atol=1e-4)
    assert used == 3
    assert not gathered(pair.model)
    pair.assert_exact_step(3)


def test_a_part_trained_alone_is_exact(pool: RankPool) -> None:
    pool.run(backward_through_a_part, 2)


def inference_mode_first() -> None:
    pair = Pair(build("llama"), Grid.create(ONLY_Z))
    with torch.inference_mode():
        torch.testing.assert_close(pair.loss(), pair.stock_loss(), rtol=1e-5, atol=0.0)
    pair.assert_exact_step()


def test_inference_mode_before_training(pool: RankPool) -> None:
    pool.run(inference_mode_first, 2)


def other_memory() -> None:
    """A parameter on one rank, whose block is its own memory: other memory of the same tensor is read, and trained."""
    pair = Pair(build("llama", tie_word_embeddings=False), Grid.create((1, 1, 1, 1)))
    pair.loss().backward()
    pair.model.zero_grad()
    parameter: Any = pair.model.lm_head._parameters["weight"]
    parameter._local_tensor.data = torch.zeros_like(parameter._local_tensor)
    loss = pair.loss()
    assert loss.item() == pytest.approx(math.log(pair.vocabulary))  # logits of zero
    loss.backward()
    assert parameter.grad._local_tensor.abs().max() > 0


def test_a_parameter_with_other_memory_is_read_from_there(pool: RankPool) -> None:
    pool.run(other_memory, 1)


def another_graph(pair: Pair, way: str) -> None:
    """A backward that is not the first one after its forward."""
    if way == "two losses":
        losses = [(pair.loss(s), pair.stock_loss(s)) for s in (2, 3)]
        for ours, expected in losses:
            ours.backward()
            expected.backward()
    elif way == "retained":
        ours, expected = pair.loss(), pair.stock_loss()
        for keep in (True, False):
            ours.backward(retain_graph=keep)
            expected.backward(retain_graph=keep)
    else:
        ours, expected = pair.loss(), pair.stock_loss()
        with torch.no_grad():
            pair.loss(3)
        ours.backward()
        expected.backward()


def two_graphs(way: str, bundle_bytes: int) -> None:
    grid = Grid.create(ONLY_Z)
    pair = Pair(build("llama"), grid, overlap(bundle_bytes=bundle_bytes))
    for _ in range(2):
        pair.zero_grad()
        another_graph(pair, way)
        pair.assert_gradients()
    pair.assert_exact_step()


@pytest.mark.parametrize("way", ["two losses", "retained", "evaluation between"])
@pytest.mark.parametrize(
    "bundle_bytes",
    [0, BUNDLE_BYTES],
)
def test_a_delayed_backward_is_exact(pool: RankPool, way: str, bundle_bytes: int) -> None:
    pool.run(two_graphs, 2, way, bundle_bytes)


def freeze_some() -> None:
    stock = build("llama")
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    for name in names:
        stock.get_parameter(name).requires_grad_(False)
    pair = Pair(stock, Grid.create((2, 2, 1, 1)))
    toggled = (*names[:1], "model.layers.1.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight")
    frozen = [set(names)] * 2 + [set(toggled)] * 2 + [set()] * 2
    for seed, now in enumerate(frozen):
        for model in (pair.stock, pair.model):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in now)
        pair.zero_grad()
        ours, expected = pair.loss(seed), pair.stock_loss(seed)
        ours.backward()
        expected.backward()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0.0)
        assert {n for n, p in pair.model.named_parameters() if p.grad is None} == now
        for model in (pair.stock, pair.model):
            for name in now:  # for the comparison of all others
                parameter = model.get_parameter(name)
                parameter.grad = torch.zeros_like(parameter)
        pair.assert_gradients()
        assert not gathered(pair.model)


def test_frozen_weights_get_no_gradient_and_the_others_are_exact(pool: RankPool) -> None:
    pool.run(freeze_some, 4)


class InjectedError(Exception):
    pass


def fail_in_between(options: dict[str, Any]) -> None:
    pair = Pair(build("llama"), Grid.create((2, 2, 1, 1)), overlap(**options))
    pair.assert_exact_step(1)

    def fail(*_: Any) -> None:
        raise InjectedError

    for seed, name in enumerate(("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj"), start=2):
        hook = pair.model.get_submodule(name).register_forward_hook(fail)
        with pytest.raises(InjectedError):
            pair.loss(seed)
        hook.remove()
        pair.assert_exact_step(seed)

        hook = pair.model.get_submodule(name).register_forward_hook(
            lambda m, a, out: out.register_hook(fail) and None
        )
        loss = pair.loss(seed)
        hook.remove()
        with pytest.raises(InjectedError):
            loss.backward()
        pair.assert_exact_step(seed + 2)
        assert not gathered(pair.model)


@pytest.mark.parametrize("options", [{}, {"keep_bytes": PLENTY}])
def test_a_failed_step_does_not_affect_the_next(pool: RankPool, options: dict[str, Any]) -> None:
    pool.run(fail_in_between, 4, options)


def accumulate() -> list[Any]:
    pair = Pair(build("llama"), Grid.create((2, 2, 1, 1)))
    items = sum(int((pair.batch(s)[1][:, 1:] != -100).sum()) for s in (2, 3))
    inside: list[Any] = []
    for inner in (True, False, True):
        pair.zero_grad()
        if inner:
            with ff.no_sync(pair.model), pair.grid.collectives.counting() as entries:
                pair.loss(2, num_items_in_batch=items).backward()
            inside += [e for e in entries if e.purpose == "gradient"]
            assert all(p.grad is None for p in pair.model.parameters())
        else:
            pair.loss(2, num_items_in_batch=items).backward()
        pair.loss(3, num_items_in_batch=items).backward()
        ids, labels = (torch.cat(tensors) for tensors in zip(pair.batch(2), pair.batch(3), strict=True))
        pair.stock(input_ids=ids, labels=labels).loss.backward()
        pair.assert_gradients()
    return inside


def test_accumulated_gradients_match_one_batch(pool: RankPool) -> None:
    for inside in pool.run(accumulate, 4):
        assert inside == []


# -- precision and choice of the back end ------------------------------------------------------------------------------------


def payloads(precision: Any, bundle_bytes: int) -> tuple[dict[tuple[str, str], int], set[torch.dtype]]:
    grid = Grid.create((2, 2, 1, 1))
    pair = Pair(build("llama"), grid, overlap(bundle_bytes=bundle_bytes), precision=precision)
    seen: set[torch.dtype] = set()
    for name, module in pair.model.named_modules():
        if name.endswith(("proj", "norm", "lm_head", "embed_tokens")):
            module.register_forward_hook(lambda m, a, o: seen.add(read_weight(m, "weight").dtype))
    train(pair, 2)
    with grid.collectives.counting() as entries:
        train(pair, 1)
    stored = (*local_parameters(pair.model).values(), *local_gradients(pair.model).values())
    assert {tensor.dtype for tensor in stored} == {torch.float32}
    return {(e.axis, e.kind): e.payload_bytes for e in entries if e.purpose in ("weight", "gradient")}, seen


def test_bf16_gathers_half_the_bytes_and_reduces_in_fp32(pool: RankPool) -> None:
    for (wide, wide_seen), (half, half_seen) in zip(
        pool.run(payloads, 4, "fp32", BUNDLE_BYTES),
        pool.run(payloads, 4, "bf16", BUNDLE_BYTES // 2),
        strict=True,
    ):
        assert (wide_seen, half_seen) == ({torch.float32}, {torch.bfloat16})
        assert 2 * half["z", "all_gather"] == wide["z", "all_gather"]
        for sums in (("z", "reduce_scatter"), ("data", "all_reduce")):
            assert half[sums] == wide[sums] > 0


def note_on_weights(weights: Any) -> str:
    report = ff.parallelize(build("llama"), Grid.create(ONLY_Z), weights=weights)
    (note,) = (note for note in report.notes if note.startswith("weights: "))
    return note


@pytest.mark.parametrize(
    ("weights", "kind", "why"),
    [("auto", "streamed", "auto"), ("streamed", "streamed", "asked for"), ("fsdp2", "fsdp2", "asked for")],
)
def test_the_report_names_the_back_end_and_the_reason(
    pool: RankPool, weights: str, kind: str, why: str
) -> None:
    for note in pool.run(note_on_weights, 2, weights):
        assert note.startswith(f"weights: {kind} ({why}")


def unknown_back_end() -> str:
    with pytest.raises(ValueError, match="fsdp3") as caught:
        ff.parallelize(build("llama"), Grid.create((1, 1, 1, 1)), weights="fsdp3")
    return str(caught.value)


def test_an_unknown_back_end_is_rejected_with_the_choices(pool: RankPool) -> None:
    (message,) = pool.run(unknown_back_end, 1)
    assert all(word in message for word in ("auto", "fsdp2", "streamed"))
