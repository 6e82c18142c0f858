"""Training on the grid: precision, accumulation, recomputation, clipping and optimizers."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.weights.api import evaluating, read_weight
from tests.models import (
    assert_shards_close,
    batch,
    build,
    gradients,
    local_gradients,
    local_parameters,
    part,
)

Shape = tuple[int, int, int, int]
# Small enough that the matrices of these models have their own collectives.
OVERLAP = ff.Overlap(bundle_bytes=1024)


def stock_step(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.item(), gradients(model)


# -- bf16 ---------------------------------------------------------------------------------------------------------------


def traffic(entries: list[Any]) -> dict[str, int]:
    """Bytes by purpose."""
    total: dict[str, int] = defaultdict(int)
    for entry in entries:
        total[entry.purpose] += entry.payload_bytes
    return total


def bf16_step(shape: Shape, kind: str, watched: str, weights: Any) -> dict[str, Any]:
    ids, labels = batch(8)
    exact_loss, exact = stock_step(build(kind), ids, labels)
    rough_loss, rough = stock_step(build(kind).to(torch.bfloat16), ids, labels)

    model, grid = build(kind), Grid.create(shape)
    # The same weights share a collective in fp32 and in bf16.
    overlap = ff.Overlap(bundle_bytes=OVERLAP.bundle_bytes // 2)
    report = ff.parallelize(model, grid, precision="bf16", weights=weights, overlap=overlap)
    seen: dict[str, torch.dtype] = {}

    def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        first = next(n for n, _ in module.named_parameters() if n.startswith("weight"))
        seen.update(weight=read_weight(module, first).dtype, input=args[0].dtype, output=output.dtype)

    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3, foreach=True)
    rows = grid.local_rows(len(ids))
    # The first step records the order in which weights are used.
    model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    model.zero_grad()
    with grid.collectives.counting() as entries:
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        loss.backward()
    ours = local_gradients(model)
    # At the end, because reading a weight gathers it.
    with evaluating(model), model.get_submodule(watched).register_forward_hook(look):
        model(input_ids=ids[rows])
    wide_model = build(kind)
    ff.parallelize(wide_model, grid, precision="fp32", weights=weights, overlap=OVERLAP)
    wide_model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    with grid.collectives.counting() as wide_entries:
        wide_model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    errors = torch.zeros(3, dtype=torch.float64)
    for name, gradient in ours.items():
        reference = part(exact, report, grid, name).double()
        errors[0] += (gradient - reference).square().sum()
        errors[1] += (part(rough, report, grid, name).double() - reference).square().sum()
        errors[2] += reference.square().sum()
    dist.all_reduce(errors)
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    return {
        "seen": seen,
        "stored": {t.dtype for t in (*ours.values(), *local_parameters(model).values(), *states)},
        "states": len(states),
        "traffic": traffic(entries),
        "fp32 traffic": traffic(wide_entries),
        "loss error": abs(loss.item() - exact_loss) / exact_loss,
        "stock loss error": abs(rough_loss - exact_loss) / exact_loss,
        "gradient error": math.sqrt(errors[0] / errors[2]),
        "stock gradient error": math.sqrt(errors[1] / errors[2]),
    }


@pytest.mark.parametrize(
    ("kind", "shape", "watched", "weights"),
    [
        ("llama", (1, 2, 2, 2), "model.layers.0.mlp.gate_proj", "streamed"),
        pytest.param(
            "gpt2", (2, 2, 1, 2), "transformer.h.0.attn.c_attn", "streamed", marks=pytest.mark.nightly
        ),
        pytest.param("gpt2", (1, 2, 1, 2), "transformer.h.0.attn.c_attn", "fsdp2", marks=pytest.mark.nightly),
        pytest.param("gpt2", (2, 2, 1, 2), "transformer.h.0.attn.c_attn", "fsdp2", marks=pytest.mark.nightly),
    ],
)
def test_bf16_computes_in_bf16_and_keeps_everything_in_fp32(
    pool: RankPool, kind: str, shape: Shape, watched: str, weights: str
) -> None:
    for seen in pool.run(bf16_step, math.prod(shape), shape, kind, watched, weights):
        assert set(seen["seen"].values()) == {torch.bfloat16}
        assert seen["stored"] == {torch.float32}
        assert seen["states"] > 0
        # Gradients are summed in fp32, weights are gathered in half the bytes.
        assert seen["traffic"]["gradient"] == seen["fp32 traffic"]["gradient"] > 0
        assert 2 * seen["traffic"]["weight"] == seen["fp32 traffic"]["weight"] > 0
        # bf16 has 8 bits: about as close to fp32 as the stock model in bf16, and not closer than bf16 can be.
        assert seen["loss error"] < 5e-3
        assert 1e-4 < seen["gradient error"] < 1.5 * seen["stock gradient error"]


# -- accumulation -------------------------------------------------------------------------------------------------------


def gradient_traffic(entries: list[Any]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(e.axis, e.kind): (e.calls, e.payload_bytes) for e in entries if e.purpose == "gradient"}


# The first sum of two DTensors of a shape takes about a second on a mesh of four axes.
FEW_SHAPES = {"llama": {"intermediate_size": 32, "num_key_value_heads": 4}, "gpt2": {"n_inner": 32}}


def accumulate(
    shape: Shape, kind: str, weights: Any, accumulation: Any
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    micro_batches = [batch(8, seed=seed) for seed in (5, 6, 7)]
    micro_batches[1][1][:, :9] = -100  # the second counts far fewer labels than the others
    ids = torch.cat([i for i, _ in micro_batches])
    labels = torch.cat([n for _, n in micro_batches])
    expected_loss, expected = stock_step(build(kind, **FEW_SHAPES[kind]), ids, labels)

    model, grid = build(kind, **FEW_SHAPES[kind]), Grid.create(shape)
    report = ff.parallelize(model, grid, weights=weights, accumulation=accumulation, overlap=OVERLAP)
    items = int((labels[:, 1:] != -100).sum())
    rows = grid.local_rows(8)

    def backward(ids: Tensor, labels: Tensor) -> float:
        loss = model(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=items).loss
        loss.backward()
        return loss.item()

    with grid.collectives.counting() as once:
        backward(*micro_batches[0])
    model.zero_grad()
    with grid.collectives.counting() as entries:
        with ff.no_sync(model):
            losses = [backward(*micro_batch) for micro_batch in micro_batches[:-1]]
        losses.append(backward(*micro_batches[-1]))
    torch.testing.assert_close(sum(losses), expected_loss, rtol=1e-5, atol=0.0)
    assert_shards_close(local_gradients(model), expected, report, grid)

    # The next step does not see what was accumulated in this one.
    model.zero_grad()
    fresh = build(kind, **FEW_SHAPES[kind])
    fresh(input_ids=ids[:8], labels=labels[:8], num_items_in_batch=items).loss.backward()
    backward(*micro_batches[0])
    assert_shards_close(local_gradients(model), gradients(fresh), report, grid)
    return gradient_traffic(once), gradient_traffic(entries)


@pytest.mark.parametrize(
    ("kind", "shape", "weights"),
    [
        ("llama", (2, 2, 1, 1), "streamed"),
        ("llama", (2, 2, 1, 1), "fsdp2"),
        ("gpt2", (1, 2, 2, 1), "streamed"),
        pytest.param("llama", (2, 2, 1, 2), "streamed", marks=pytest.mark.nightly),
    ],
)
def test_accumulated_gradients_match_one_batch_and_are_sent_once(
    pool: RankPool, kind: str, shape: Shape, weights: str
) -> None:
    for once, accumulated in pool.run(accumulate, math.prod(shape), shape, kind, weights, "whole"):
        assert accumulated == once
        assert bool(once.get(("data", "all_reduce"))) == (shape[0] > 1)
        assert bool(once.get(("z", "reduce_scatter"))) == (shape[1] > 1)


@pytest.mark.parametrize(
    ("kind", "shape", "weights"),
    [
        ("llama", (2, 2, 1, 1), "streamed"),
        ("llama", (2, 2, 1, 1), "fsdp2"),
        ("gpt2", (1, 2, 2, 1), "streamed"),
        pytest.param("gpt2", (2, 2, 1, 2), "fsdp2", marks=pytest.mark.nightly),
        pytest.param("llama", (4, 1, 1, 1), "streamed", marks=pytest.mark.nightly),
        pytest.param("llama", (2, 2, 1, 2), "streamed", marks=pytest.mark.nightly),
    ],
)
def test_gradients_that_are_accumulated_in_shards_match_and_go_over_data_once(
    pool: RankPool, kind: str, shape: Shape, weights: str
) -> None:
    for once, accumulated in pool.run(accumulate, math.prod(shape), shape, kind, weights, "sharded"):
        over_z = ("z", "reduce_scatter")
        calls, sent = once.pop(over_z, (0, 0))
        assert accumulated.pop(over_z, (0, 0)) == (3 * calls, 3 * sent)  # of three micro-batches
        assert bool(calls) == (shape[1] > 1)
        assert accumulated == once


# -- recomputation ------------------------------------------------------------------------------------------------------


def step_and_saved_bytes(
    grid: Grid, kind: str, checkpointing: Any, weights: Any
) -> tuple[float, dict[str, Tensor], int]:
    model = build(kind)
    # Not split, because the hooks apply to this thread only.
    overlap = replace(OVERLAP, interleave=False)
    ff.parallelize(model, grid, activation_checkpointing=checkpointing, weights=weights, overlap=overlap)
    ids, labels = batch(8)
    rows = grid.local_rows(len(ids))
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
    loss.backward()
    return loss.item(), local_gradients(model), saved


def recompute(shape: Shape, kind: str, weights: Any) -> tuple[int, int]:
    grid = Grid.create(shape)
    loss, expected, saved = step_and_saved_bytes(grid, kind, "none", weights)
    loss_again, recomputed, saved_less = step_and_saved_bytes(grid, kind, "full", weights)
    assert loss_again == loss
    for name, gradient in recomputed.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0.0, atol=0.0)
    return saved, saved_less


@pytest.mark.parametrize(
    ("kind", "shape", "weights"),
    [
        ("llama", (1, 2, 2, 2), "streamed"),
        pytest.param("gpt2", (1, 2, 1, 2), "fsdp2", marks=pytest.mark.nightly),
        pytest.param("gpt2", (2, 2, 1, 2), "fsdp2", marks=pytest.mark.nightly),
        pytest.param("llama", (1, 2, 2, 2), "fsdp2", marks=pytest.mark.nightly),
        pytest.param("gpt2", (2, 2, 1, 2), "streamed", marks=pytest.mark.nightly),
    ],
)
def test_recomputation_saves_memory_and_gradients_are_bitwise_equal(
    pool: RankPool, kind: str, shape: Shape, weights: str
) -> None:
    for saved, saved_less in pool.run(recompute, math.prod(shape), shape, kind, weights):
        assert saved_less < saved / 2


# -- clipping -----------------------------------------------------------------------------------------------------------


def clip(shape: Shape, kind: str, changes: dict[str, Any], weights: Any) -> None:
    ids, labels = batch(8)
    stock = build(kind, **changes)
    _, unclipped = stock_step(stock, ids, labels)
    expected_norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.1)
    clipped = gradients(stock)
    assert expected_norm > 0.2

    model, grid = build(kind, **changes), Grid.create(shape)
    report = ff.parallelize(model, grid, weights=weights, overlap=OVERLAP)
    rows = grid.local_rows(len(ids))
    model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    norm = ff.clip_grad_norm_(model.parameters(), 1e6, grid)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0.0)
    assert_shards_close(local_gradients(model), unclipped, report, grid)
    norm = ff.clip_grad_norm_(model.parameters(), 0.1, grid)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0.0)
    assert_shards_close(local_gradients(model), clipped, report, grid)


@pytest.mark.parametrize(
    ("kind", "shape", "changes", "weights"),
    [
        # Norms of q and k are replicated on x and y; with one key/value head its projections are replicated on x.
        ("qwen3", (1, 2, 2, 2), {"num_key_value_heads": 1}, "streamed"),
        pytest.param("qwen3", (1, 2, 2, 2), {"num_key_value_heads": 1}, "fsdp2", marks=pytest.mark.nightly),
        pytest.param(
            "qwen3", (2, 1, 1, 4), {"num_key_value_heads": 2}, "streamed", marks=pytest.mark.nightly
        ),
        pytest.param("qwen3", (2, 1, 1, 4), {"num_key_value_heads": 2}, "fsdp2", marks=pytest.mark.nightly),
        pytest.param(
            "llama",
            (2, 2, 1, 2),
            {"num_key_value_heads": 1, "attention_bias": True},
            "streamed",
            marks=pytest.mark.nightly,
        ),
        ("llama", (2, 2, 1, 2), {"num_key_value_heads": 1, "attention_bias": True}, "fsdp2"),
        ("gpt2", (2, 1, 2, 2), {}, "streamed"),
    ],
)
def test_the_gradient_norm_matches_one_process(
    pool: RankPool, kind: str, shape: Shape, changes: dict[str, Any], weights: str
) -> None:
    pool.run(clip, 8, shape, kind, changes, weights)


def clip_what_is_not_on_the_grid() -> str:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"\(3,\)") as caught:
        ff.clip_grad_norm_([parameter], 1.0, Grid.create((1, 1, 1, 1)))
    return str(caught.value)


def test_clipping_plain_parameters_is_rejected(pool: RankPool) -> None:
    assert "parallelize" in pool.run(clip_what_is_not_on_the_grid, 1)[0]


# -- optimizers ---------------------------------------------------------------------------------------------------------


def two_steps(grid: Grid, make: Any) -> dict[str, Tensor]:
    model = build("llama", num_hidden_layers=1)
    ff.parallelize(model, grid)
    optimizer = make(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=True)
    for seed in (3, 4):
        ids, labels = batch(2, seed=seed)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return local_parameters(model)


def adamw_both_ways() -> None:
    grid = Grid.create((1, 1, 1, 2))
    expected = two_steps(grid, torch.optim.AdamW)
    for name, parameter in two_steps(grid, ff.sharded_optimizer(torch.optim.AdamW)).items():
        torch.testing.assert_close(parameter, expected[name], rtol=0.0, atol=0.0)


@pytest.mark.nightly
def test_adamw_on_shards_is_adamw_on_dtensors_bit_for_bit(pool: RankPool) -> None:
    pool.run(adamw_both_ways, 2)


def optimizer_of_gathered_weights() -> str:
    model = build("llama", num_hidden_layers=1)
    ff.parallelize(model, Grid.create((1, 1, 1, 1)), weights="fsdp2")
    with torch.no_grad():
        model(input_ids=batch(2)[0])
    with pytest.raises(ValueError, match="gathered") as caught:
        ff.sharded_optimizer(torch.optim.AdamW)(model.parameters())
    return str(caught.value)


def test_an_optimizer_of_gathered_weights_is_rejected(pool: RankPool) -> None:
    """It would train copies that FSDP2 drops, and the weights would never change."""
    assert "before the first forward" in pool.run(optimizer_of_gathered_weights, 1)[0]


# An epsilon below the gradients but above rounding noise: a smaller one would turn noise into full updates.
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 1e-2, "eps": 1e-3}),
    (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-3}),
    (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-3, "momentum": 0.5}),
]


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups; all of a packed projection's parts are matrices, or all are vectors."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def each_optimizer(shape: Shape, weights: Any) -> None:
    grid = Grid.create(shape)
    for optimizer_class, options in OPTIMIZERS:
        stock, model = build("gpt2"), build("gpt2")
        report = ff.parallelize(model, grid, weights=weights, overlap=OVERLAP)
        expected = optimizer_class(by_decay(stock), **options)
        optimizer = ff.sharded_optimizer(optimizer_class)(by_decay(model), **options)
        before = {name: p.detach().clone() for name, p in stock.named_parameters()}
        for seed in (3, 4):
            ids, labels = batch(4, seed=seed)
            rows = grid.local_rows(len(ids))
            stock(input_ids=ids, labels=labels).loss.backward()
            model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
            expected.step()
            optimizer.step()
            expected.zero_grad(set_to_none=seed == 3)
            optimizer.zero_grad(set_to_none=seed == 3)
        # Compare the updates, not the weights.
        added = {name: p.detach() - before[name] for name, p in stock.named_parameters()}
        ours = {n: p - part(before, report, grid, n) for n, p in local_parameters(model).items()}
        assert_shards_close(ours, added, report, grid, bar=1e-3)


@pytest.mark.parametrize("weights", ["streamed", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_elementwise_optimizers_match_one_process(pool: RankPool, weights: str) -> None:
    pool.run(each_optimizer, 4, (1, 2, 1, 2), weights)


@pytest.mark.parametrize("optimizer_class", [torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor])
def test_an_optimizer_of_full_matrices_is_rejected(optimizer_class: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=optimizer_class.__name__):
        ff.sharded_optimizer(optimizer_class)


def test_an_optimizer_made_before_parallelize_is_rejected() -> None:
    with pytest.raises(ValueError, match="after"):
        ff.sharded_optimizer(torch.optim.AdamW)(nn.Linear(2, 3).parameters())


def output_without_tensors() -> str:
    grid = Grid.create((1, 2, 1, 1))
    model = build("llama")
    ff.parallelize(model, grid, weights="fsdp2")
    model.register_forward_hook(lambda *_: SimpleNamespace(loss=1.0), prepend=True)
    ids, _ = batch(2)
    with pytest.raises(ff.UnsupportedError) as caught:
        model(input_ids=ids[grid.local_rows(2)])
    return str(caught.value)


def test_an_output_in_which_fsdp2_finds_no_tensor_is_rejected(pool: RankPool) -> None:
    for message in pool.run(output_without_tensors, 2):
        assert message.startswith(
            "LlamaForCausalLM returns a SimpleNamespace, in which FSDP2 finds no tensor"
        )
        assert "weights='streamed'" in message


class _TwoHeads(nn.Module):
    """Each micro-batch uses one of two linears of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: Tensor, which: str) -> Tensor:
        loss: Tensor = self.heads[which](x).square().sum()
        return loss


def use_in_turns(weights: Any) -> None:
    grid = Grid.create((2, 1, 1, 1))
    x = torch.arange(8.0).view(2, 4)
    right = _TwoHeads()
    for which in ("a", "b"):
        right(x, which).backward()
    model = _TwoHeads()
    ff.parallelize(model, grid, weights=weights, accumulation="sharded")
    own = x[grid.local_rows(2)]
    with ff.no_sync(model):
        model(own, "a").backward()
    model(own, "b").backward()
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        expected = right.get_parameter(name).grad
        assert expected is not None
        torch.testing.assert_close(getattr(gradient, "_local_tensor", gradient), expected)


@pytest.mark.parametrize("weights", ["fsdp2", "streamed"])
def test_micro_batches_that_use_different_parameters_are_added_up(pool: RankPool, weights: str) -> None:
    pool.run(use_in_turns, 2, weights)
