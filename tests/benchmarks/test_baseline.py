"""The benchmarks' opponent has to be right before it may be slow: every layout against one process."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.baseline import Baseline, Layout, Tensors, build, layouts
from benchmarks.ranks import RankPool

pytestmark = pytest.mark.nightly

ROWS, LENGTH, VOCABULARY, STEPS = 8, 12, 128, 3
# An update is decided by the gradient, not by the rounding of one that is zero.
OPTIMIZER = {"lr": 1e-2, "eps": 1e-5}
LAYOUTS = [
    Layout(1, 1, 4),
    Layout(1, 4, 1),
    Layout(2, 2, 1),
    Layout(1, 2, 2),
    Layout(4, 1, 1),
    Layout(2, 1, 2),
]
EIGHT = Layout(2, 2, 2)


def config(**changes: Any) -> LlamaConfig:
    options = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaConfig(**options | changes)


def batch(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def one_process(**changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each step, and the gradients of the last."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(**changes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses = []
    for step in range(STEPS):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}


def train(baseline: Baseline) -> list[float]:
    losses = []
    rows = baseline.local_rows(ROWS)
    for step in range(STEPS):
        if step:
            baseline.optimizer_step()
        losses.append(baseline.step(batch(step)[rows], batch(step)[rows]).item())
    return losses


def compare(
    layout: Layout, options: dict[str, Any], changes: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """The largest relative error of a loss, and each gradient's error by its own largest entry."""
    expected_losses, expected = one_process(**changes)
    baseline = build(config(**changes), layout, optimizer=OPTIMIZER, **options)
    losses = train(baseline)
    gradients = baseline.whole_gradients()
    assert set(gradients) == set(expected)
    loss_error = max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True))
    errors = {n: float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()}
    return loss_error, errors


def assert_exact(pool: RankPool, layout: Layout, options: dict[str, Any], **changes: Any) -> None:
    for loss_error, errors in pool.run(compare, layout.world, layout, options, changes):
        assert loss_error < 1e-5
        assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_gradients_are_those_of_one_process(pool: RankPool, layout: Layout) -> None:
    assert_exact(pool, layout, {})


@pytest.mark.parametrize("tensors", ["sequence-parallel", "megatron"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.tensor > 1], ids=str)
def test_so_are_those_of_a_cut_sequence(pool: RankPool, layout: Layout, tensors: Tensors) -> None:
    assert_exact(pool, layout, {"tensors": tensors})


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True, "prefetch_depth": 2},
        {"activation_checkpointing": True, "tensors": "sequence-parallel", "reshard_after_forward": False},
        {"activation_checkpointing": True, "tensors": "megatron", "prefetch_depth": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_change_no_number(pool: RankPool, options: dict[str, Any]) -> None:
    # Three axes at once, and key/value heads that queries share.
    assert_exact(pool, EIGHT, options, num_key_value_heads=2)


def test_recomputation_goes_with_ddp_and_tensor_parallelism(pool: RankPool) -> None:
    assert_exact(pool, Layout(2, 1, 2), {"activation_checkpointing": True})


def collectives(layers: int, options: dict[str, Any]) -> dict[str, int]:
    baseline = build(config(num_hidden_layers=layers), Layout(1, 2, 2), **options)
    rows = baseline.local_rows(ROWS)
    with CommDebugMode() as account:
        baseline.step(batch(0)[rows], batch(0)[rows])
    return {str(op): calls for op, calls in account.get_comm_counts().items()}


@pytest.mark.parametrize(
    ("options", "all_reduces", "gathers"),
    [
        ({}, 4, 2),
        ({"reshard_after_forward": False}, 4, 1),
        # Recomputing stops before the layer's last all-reduce, and finds the weights gathered for backward.
        ({"activation_checkpointing": True}, 5, 2),
    ],
    ids=["plain", "keep weights", "recompute"],
)
def test_a_layer_sends_no_more_than_it_must(
    pool: RankPool, options: dict[str, Any], all_reduces: int, gathers: int
) -> None:
    # The difference of two depths: what embedding, head and loss send is not looked at.
    two, three = (pool.run(collectives, 4, layers, options)[0] for layers in (2, 3))
    more = {op: calls - two.get(op, 0) for op, calls in three.items() if calls > two.get(op, 0)}
    assert more == {
        "c10d_functional.all_reduce": all_reduces,
        "c10d._allgather_base_": gathers,
        "c10d._reduce_scatter_base_": 1,
    }


def refusal(layout: Layout, changes: dict[str, Any], label: int) -> str:
    try:
        baseline = build(config(**changes), layout)
        ids = batch(0)[baseline.local_rows(ROWS)]
        labels = ids.clone()
        labels[0, 0] = label
        baseline.step(ids, labels)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "changes", "label", "message"),
    [
        (Layout(1, 1, 4), {"num_key_value_heads": 2}, 0, "2 key/value heads do not divide over tensor=4"),
        (Layout(1, 4, 1), {"tie_word_embeddings": True}, 0, "tie_word_embeddings=False"),
        (Layout(1, 4, 1), {}, -100, "labels hold -100"),
        (Layout(3, 1, 2), {}, 0, "needs 6 ranks, there are 4"),
    ],
)
def test_refuses_what_would_not_be_the_same_step(
    pool: RankPool, layout: Layout, changes: dict[str, Any], label: int, message: str
) -> None:
    assert all(message in said for said in pool.run(refusal, 4, layout, changes, label))


def test_layouts_are_every_even_split() -> None:
    found = layouts(8, heads=8, kv_heads=4, global_batch=4)
    assert set(found) == {
        Layout(4, 1, 2),
        Layout(2, 2, 2),
        Layout(1, 4, 2),
        Layout(2, 1, 4),
        Layout(1, 2, 4),
    }
    assert len(found) == 5
