"""Sequence-parallel activations: exact results, no additional traffic, and each rank's share of memory and FLOPs."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.errors import UnsupportedError
from fourfold.selftest import OVERLAP, Errors, train_on
from fourfold.weights.api import read_weight
from tests.models import (
    VOCABULARY,
    assert_shards_close,
    batch,
    build,
    gradients,
    local_gradients,
)

Shape = tuple[int, int, int, int]
AGAIN = ff.Overlap(bundle_bytes=1024, keep_inputs=False)
CHUNKS = ff.Overlap(bundle_bytes=1024, forward_chunks=3)


# -- exactness ------------------------------------------------------------------------------------------------------------


def train(shape: Shape, kind: str, options: dict[str, Any]) -> Errors:
    return train_on(Grid.create(shape), kind, activations="sequence-parallel", **options)


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("llama", (1, 1, 2, 2), {"weights": "fsdp2", "overlap": CHUNKS}),
        pytest.param(
            "llama", (1, 1, 2, 4), {"weights": "streamed"}, marks=pytest.mark.nightly
        ),  # two y ranks use one key/value head
        pytest.param(
            "llama",
            (1, 1, 4, 2),
            {"weights": "fsdp2", "activation_checkpointing": "full"},
            marks=pytest.mark.nightly,
        ),
        (
            "llama",
            (1, 2, 2, 2),
            {"weights": "streamed", "overlap": AGAIN, "activation_checkpointing": "full"},
        ),
        ("qwen3", (1, 1, 2, 2), {"weights": "streamed", "overlap": AGAIN}),
        pytest.param(
            "gpt2", (1, 1, 2, 4), {"weights": "streamed", "overlap": CHUNKS}, marks=pytest.mark.nightly
        ),
        ("gpt2", (1, 2, 2, 1), {"weights": "fsdp2", "overlap": AGAIN}),
        pytest.param(
            "gemma2",
            (1, 1, 2, 2),
            {"weights": "streamed", "overlap": ff.Overlap.none()},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_three_steps_match_one_process(
    pool: RankPool, kind: str, shape: Shape, options: dict[str, Any]
) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    errors = Errors.worst(pool.run(train, ranks, shape, kind, options))
    assert errors.within_bars(), errors


def prepare(grid: Grid, kind: str, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    model = build(kind, **(changes or {}))
    options = {"activations": "sequence-parallel", "overlap": OVERLAP} | options
    return model, ff.parallelize(model, grid, **options)


def accumulate(shape: Shape, kind: str, changes: dict[str, Any]) -> tuple[str, ...]:
    """Two micro-batches of different sizes, both forwards before the first backward; y does not divide three sequences."""
    grid = Grid.create(shape)
    model, report = prepare(grid, kind, changes, activation_checkpointing="full")
    stock = build(kind, **changes)
    short, long = batch(4, 4), batch(3, 8, seed=3)
    losses = []
    for ids, labels in (short, long):
        stock(input_ids=ids, labels=labels, num_items_in_batch=20).loss.backward()
        losses.append(model(input_ids=ids, labels=labels, num_items_in_batch=20).loss)
    with ff.no_sync(model):
        losses[1].backward()
    # Streamed weights allow one backward for each forward, so run the second forward again.
    ids, labels = short
    model(input_ids=ids, labels=labels, num_items_in_batch=20).loss.backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    # The batch of three sequences on its own: its backward sends the gradients.
    ids, labels = long
    for trained in (stock, model):
        trained.zero_grad()
        trained(input_ids=ids, labels=labels).loss.backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    return tuple(note for note in report.notes if "core" in note)


def test_accumulated_gradients_with_batches_of_different_lengths(pool: RankPool) -> None:
    assert pool.run(accumulate, 4, (1, 1, 2, 2), "llama", {})[0] == ()


def padded(shape: Shape, side: str, activations: str) -> None:
    """A padded batch: a mask for attention, and labels of -100."""
    grid = Grid.create(shape)
    model, report = prepare(grid, "llama", activations=activations)
    stock = build("llama")
    ids, labels = batch(4, 8)
    mask = torch.ones_like(ids)
    for row, kept in enumerate((8, 5, 3, 7)):
        mask[row, kept:] = 0
    mask = mask if side == "right" else mask.flip(1)
    labels = labels.masked_fill(mask == 0, -100)
    expected = stock(input_ids=ids, attention_mask=mask, labels=labels).loss
    expected.backward()
    rows = grid.local_rows(len(ids))
    loss = model(input_ids=ids[rows], attention_mask=mask[rows], labels=labels[rows]).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("activations", ["sequence-parallel", "replicated"])
def test_padded_rows(pool: RankPool, side: str, activations: str) -> None:
    pool.run(padded, 4, (1, 2, 1, 2), side, activations)
    pool.run(padded, 4, (1, 1, 2, 2), side, activations)


SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 48}


# qwen3 has norms of queries and keys; gpt2 three biases in one; gpt_neox_japanese one of hidden features.
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gpt2",
        pytest.param("qwen3", marks=pytest.mark.nightly),
        pytest.param("gpt_neox_japanese", marks=pytest.mark.nightly),
    ],
)
def test_attention_is_exact_where_heads_do_not_divide(pool: RankPool, kind: str) -> None:
    notes = pool.run(accumulate, 4, (1, 1, 2, 2), kind, SIX_HEADS)[0]
    assert len(notes) == 1
    assert "computed on each of the 2 y ranks" in notes[0]
    assert "x*y=4" in notes[0]
    assert "6 heads" in notes[0]


def flops(shape: Shape, changes: dict[str, Any], sequences: int) -> tuple[int, int]:
    """The FLOPs of a step, on this rank and in one process."""
    grid = Grid.create(shape)
    ids, labels = batch(sequences, 8)
    model, _ = prepare(grid, "llama", changes, overlap=ff.Overlap(interleave=False))
    stock = build("llama", **changes)
    found = []
    for module in (model, stock):
        module.config._attn_implementation = "eager"
        with FlopCounterMode(display=False) as counter:
            module(input_ids=ids, labels=labels).loss.backward()
        found.append(counter.get_total_flops())
    return found[0], found[1]


@pytest.mark.nightly
def test_total_flops_equal_those_of_one_process(pool: RankPool) -> None:
    """Where x*y does not divide the heads, attention's core alone is computed on each of the 2 y ranks."""
    for changes, sequences, factor in (({}, 4, 1), (SIX_HEADS, 4, 2), (SIX_HEADS, 3, 2)):
        counts = pool.run(flops, 4, (1, 1, 2, 2), changes, sequences)
        attention = 2 * 12 * sequences * 8 * 8 * changes.get("hidden_size", 32)
        assert sum(mine for mine, _ in counts) == counts[0][1] + (factor - 1) * attention


def loss_from_logits(shape: Shape) -> None:
    """The loss from a rank's logits, and the full logits, also where two half-batches alternate."""
    grid = Grid.create(shape)
    model, _ = prepare(grid, "llama")
    stock = build("llama")
    ids, labels = batch(4, 8)
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    right = stock(input_ids=ids, labels=labels)
    for _ in range(2):
        logits = model(input_ids=ids).logits
        loss = ff.cross_entropy(logits, shifted, grid, vocab_size=VOCABULARY)
        torch.testing.assert_close(loss, right.loss, rtol=1e-5, atol=0.0)
        every = ff.full_logits(logits, grid, vocab_size=VOCABULARY, batch=(4, 8))
        torch.testing.assert_close(every, right.logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        loss = model(input_ids=ids[:3], labels=labels[:3]).loss  # three sequences cannot be split into halves
        torch.testing.assert_close(
            loss, stock(input_ids=ids[:3], labels=labels[:3]).loss, rtol=1e-5, atol=0.0
        )


def test_loss_and_full_logits_from_local_logits(pool: RankPool) -> None:
    for shape in ((1, 1, 2, 2), (1, 1, 1, 4)):
        pool.run(loss_from_logits, 4, shape)


# -- traffic --------------------------------------------------------------------------------------------------------------


def sent_bytes(grid: Grid, kind: str, changes: dict[str, Any], **options: Any) -> dict[Any, Fraction]:
    """Bytes that this rank sends in one step, by axis and purpose."""
    model, _ = prepare(grid, kind, changes, **options)
    ids, labels = batch(8, 16)
    rows = grid.local_rows(8)
    model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    with grid.collectives.counting() as entries:
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    sent: dict[Any, Fraction] = {}
    for e in entries:
        passes = 2 if e.kind == "all_reduce" else 1
        key = (e.axis, e.purpose)
        sent[key] = sent.get(key, Fraction(0)) + Fraction(passes * (e.ranks - 1) * e.payload_bytes, e.ranks)
    return sent


def count(shape: Shape, kind: str, changes: dict[str, Any]) -> list[dict[Any, Fraction]]:
    """With replicated activations, with sequence-parallel ones, and with inputs that are gathered again in backward."""
    grid = Grid.create(shape)
    return [
        sent_bytes(grid, kind, changes, activations="replicated"),
        sent_bytes(grid, kind, changes),
        sent_bytes(grid, kind, changes, overlap=AGAIN),
    ]


HEADS_OF_8 = {"num_attention_heads": 8, "hidden_size": 64}


# Each rank has one of eight heads; four ranks share each of two key/value heads.
@pytest.mark.parametrize(
    ("kind", "shape", "changes"),
    [
        ("llama", (1, 2, 2, 2), HEADS_OF_8 | {"num_key_value_heads": 2}),
        pytest.param("gpt2", (1, 1, 4, 2), HEADS_OF_8, marks=pytest.mark.nightly),
    ],
)
def test_token_sharding_sends_the_same_activation_bytes(
    pool: RankPool, kind: str, shape: Shape, changes: dict[str, Any]
) -> None:
    _, z, y, x = shape
    for replicated, kept, again in pool.run(count, 8, shape, kind, changes):
        for sent in (kept, again):
            for axis in ("x", "y"):
                assert sent[axis, "activation"] == replicated[axis, "activation"] > 0
            for key in (("z", "weight"), ("z", "gradient")):
                assert sent.get(key) == replicated.get(key)
            # A norm's statistics are those of 1/x of the tokens.
            assert sent["y", "norm"] * x == replicated["y", "norm"]
        usual = {"activation", "weight", "gradient", "norm", "loss", "replica"}
        shared = {"shared"} if kind == "llama" else set()
        assert {purpose for _, purpose in kept} - usual == shared
        assert {purpose for _, purpose in again} - usual == shared | {"regather"}
        tokens, h, f, blocks = 8 * 16 // z, 64, 64, 2
        if kind == "llama":
            # A norm's weight is used for different tokens on each x rank: its gradient is summed, once for both half-batches.
            norms = 4 * (2 * blocks + 1) * 2 * Fraction(x - 1, x) * h / y
            for sent in (kept, again):
                assert sent["x", "replica"] - replicated.get(("x", "replica"), 0) == norms
                assert ("y", "replica") not in sent
        # The inputs of attention, of the MLP and of the head; those of o and down.
        # Not the head's: its gradients are computed in forward, with the loss.
        assert again["x", "regather"] == 4 * 2 * blocks * Fraction(x - 1, x) * tokens * h / y
        assert again["y", "regather"] == 4 * blocks * Fraction(y - 1, y) * tokens * (h + f) / x


# -- memory and FLOPs -----------------------------------------------------------------------------------------------------

B, S, H, F, HEADS, VOCABULARY_OF_8 = 2, 16, 64, 96, 8, 128


def small_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": H, "intermediate_size": F, "num_attention_heads": HEADS}
    config = LlamaConfig(**sizes, num_key_value_heads=HEADS, num_hidden_layers=1, vocab_size=VOCABULARY_OF_8)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def saved_and_flops(shape: Shape, keep_inputs: bool) -> tuple[int, int]:
    """The elements that a block saves for backward, each storage once, and the FLOPs of a step."""
    grid = Grid.create(shape)
    model = small_llama()
    overlap = ff.Overlap(keep_inputs=keep_inputs, interleave=False)
    ff.parallelize(model, grid, activations="sequence-parallel", overlap=overlap)
    kept: dict[int, Tensor] = {}
    elsewhere = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    block = model.model.layers[0]
    inner = block.forward

    def forward(*args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        elsewhere.update(table.untyped_storage().data_ptr() for table in position_embeddings)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(*args, position_embeddings=position_embeddings, **kwargs)

    block.forward = forward
    ids = torch.arange(B * S).reshape(B, S)
    with FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids).loss.backward()
    elements = sum(t.untyped_storage().nbytes() // 4 for p, t in kept.items() if p not in elsewhere)
    return elements, flops.get_total_flops()


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), pytest.param((1, 1, 4, 2), marks=pytest.mark.nightly)])
def test_memory_and_flops_of_a_block(pool: RankPool, shape: Shape) -> None:
    _, _, y, x = shape
    tokens = B * S
    # The input and the normalised input of two norms. q, k, v and probabilities. Gate, silu(gate) and up.
    saved = tokens * (4 * H + 3 * H + S * HEADS + 3 * F) // (x * y)
    saved += 2 * tokens // x  # the norms' statistics, on each y rank
    # The inputs of q, k, v, of gate and up, of o and of down: unsharded over one axis, or sharded over both.
    kept = tokens * (2 * H // y + (H + F) // x)
    again = tokens * (2 * H + H + F) // (x * y)
    matmuls = 6 * tokens * (4 * H * H + 3 * H * F + H * VOCABULARY_OF_8) // (x * y)
    attention = 12 * B * S * S * H // (x * y)
    assert set(pool.run(saved_and_flops, 8, shape, True)) == {(saved + kept, matmuls + attention)}
    assert set(pool.run(saved_and_flops, 8, shape, False)) == {(saved + again, matmuls + attention)}


# -- dropout --------------------------------------------------------------------------------------------------------------


def drop(shape: Shape) -> list[Tensor]:
    grid = Grid.create(shape)
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    ids, labels = batch(2, 16)
    found, masks = [], []
    for checkpointing in ("none", "selective", "full"):
        model, _ = prepare(grid, "gpt2", rates, activation_checkpointing=checkpointing)

        def see(module: nn.Module, args: Any, output: Tensor) -> None:
            masks.append(output.detach() != 0)

        hook = model.transformer.h[0].attn.resid_dropout.register_forward_hook(see)
        loss = model(input_ids=ids, labels=labels).loss
        hook.remove()
        loss.backward()
        found.append(local_gradients(model))
    for name, gradient in found[0].items():
        assert all(torch.equal(gradient, others[name]) for others in found[1:]), name
    return masks


def test_dropout_masks_differ_by_rank_and_repeat_when_recomputed(pool: RankPool) -> None:
    masks = pool.run(drop, 4, (1, 1, 2, 2))
    for mine, *again in masks:
        assert all(torch.equal(mine, other) for other in again)
    firsts = [mine for mine, *_ in masks]
    assert all(not torch.equal(firsts[i], firsts[j]) for i in range(4) for j in range(i))


def attention_masks(shape: Shape, kv_heads: int) -> list[Tensor]:
    """The dropout masks of the attention probabilities of each block."""
    grid = Grid.create(shape)
    changes = {"attention_dropout": 0.5, "attn_implementation": "eager", "num_key_value_heads": kv_heads}
    model, _ = prepare(grid, "llama", changes)
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, __, output: found.append(output[1].detach() != 0))
    model(input_ids=batch(1, 16)[0].expand(2, -1))
    return found


# Each rank has one of four heads, with a key/value head of its own, shared with its y neighbour, or shared by all.
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_dropout_masks_differ_by_head(pool: RankPool, kv_heads: int) -> None:
    masks = [blocks[0] for blocks in pool.run(attention_masks, 4, (1, 1, 2, 2), kv_heads)]
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


# -- errors ------------------------------------------------------------------------------------------------------


def unsupported_requests(shape: Shape) -> list[str]:
    grid = Grid.create(shape)
    model, _ = prepare(grid, "llama")
    ids, _ = batch(1, 12)
    attempts: list[Any] = [
        lambda: model(input_ids=ids[:, :11]),
        lambda: model(input_ids=ids, logits_to_keep=6),  # the number of tokens of an x rank
    ]
    sliced, _ = prepare(grid, "llama")
    sliced.lm_head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:],))
    attempts.append(lambda: sliced(input_ids=ids))
    scaling, _ = prepare(grid, "llama")
    attention = scaling.model.layers[0].self_attn
    inner = attention.forward

    def forward(hidden_states: Tensor, **others: Any) -> Any:
        return inner(hidden_states=hidden_states * 2, **others)

    attention.forward = forward
    attempts.append(lambda: scaling(input_ids=ids))
    concatenating, _ = prepare(grid, "llama")
    concatenating_attention = concatenating.model.layers[1].self_attn
    concatenated = concatenating_attention.forward

    def forward_concatenated(hidden_states: Tensor, **others: Any) -> Any:
        return concatenated(hidden_states=torch.cat([hidden_states, hidden_states]), **others)

    concatenating_attention.forward = forward_concatenated
    attempts.append(lambda: concatenating(input_ids=ids))
    again = build("llama")
    again.gradient_checkpointing_enable()
    attempts.append(lambda: ff.parallelize(again, grid, activations="sequence-parallel"))
    attempts.append(
        lambda: ff.parallelize(nn.Linear(4, 4), grid, roles={"": "colwise"}, activations="sequence-parallel")
    )
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    no_norm = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes))
    attempts.append(lambda: ff.parallelize(no_norm, grid, activations="sequence-parallel"))
    return [error_of(attempt) for attempt in attempts]


def error_of(attempt: Callable[[], Any]) -> str:
    with pytest.raises(UnsupportedError) as caught:
        attempt()
    return str(caught.value)


def used_twice() -> str:
    """Read a norm's weight without summing its gradient over x, although each x rank has only a part of it."""
    grid = Grid.create((1, 1, 1, 2))
    model, _ = prepare(grid, "llama")
    model(input_ids=batch(2, 12)[0])
    return error_of(lambda: read_weight(model.model.norm, "weight"))


def test_a_weight_with_conflicting_gradient_axes_is_rejected(pool: RankPool) -> None:
    message = pool.run(used_twice, 2)[0]
    assert "model.norm.weight is used twice" in message
    assert "('x',)" in message
    assert "weights='fsdp2'" in message


def test_errors_name_what_cannot_be_sequence_parallel(pool: RankPool) -> None:
    messages = pool.run(unsupported_requests, 4, (1, 1, 2, 2))[0]
    uneven, kept, sliced, scaling, concatenating, again, no_model, no_norm = messages
    assert "x=2 does not divide the 1 * 11 = 11 tokens" in uneven
    assert "logits_to_keep=6" in kept
    assert "lm_head got 1 tokens" in sliced
    assert "model.layers.0.self_attn" in scaling
    assert "hidden_states * 2" in scaling  # the line of code
    assert "model.layers.1.self_attn" in concatenating
    assert "torch.cat" in concatenating
    assert "activation_checkpointing='full'" in again
    assert "Linear" in no_model
    assert re.search(r"no norm .*modeling_openai.py:\d+: for .*self\.h", no_norm)
    for message in messages:
        assert "activations='replicated'" in message
