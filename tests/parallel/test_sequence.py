"""Token-sharded activations: exact, no byte more, and nothing kept or computed twice."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.errors import UnsupportedError
from fourfold.selftest import OVERLAP, Errors, train_on
from fourfold.weights.api import local_weight
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
    return train_on(Grid.create(shape), kind, activations="token-sharded", **({"overlap": OVERLAP} | options))


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
def test_three_steps_are_those_of_one_process(
    pool: RankPool, kind: str, shape: Shape, options: dict[str, Any]
) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    errors = Errors.worst(pool.run(train, ranks, shape, kind, options))
    assert errors.within_bars(), errors


def prepare(grid: Grid, kind: str, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    model = build(kind, **(changes or {}))
    options = {"activations": "token-sharded", "overlap": OVERLAP} | options
    return model, ff.parallelize(model, grid, **options)


def accumulate(shape: Shape, kind: str, changes: dict[str, Any]) -> tuple[str, ...]:
    """Two micro-batches of other sizes, both forwards before the first backward; three samples do not divide over y."""
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
    # Streamed weights know one backward for each forward: the second one anew.
    ids, labels = short
    model(input_ids=ids, labels=labels, num_items_in_batch=20).loss.backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    # And the one that does not divide alone: its backward is the one that sends.
    ids, labels = long
    for trained in (stock, model):
        trained.zero_grad()
        trained(input_ids=ids, labels=labels).loss.backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    return tuple(note for note in report.notes if "core" in note)


def test_accumulated_gradients_and_batches_of_several_lengths(pool: RankPool) -> None:
    assert pool.run(accumulate, 4, (1, 1, 2, 2), "llama", {})[0] == ()


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
def test_attention_is_cut_by_samples_where_heads_do_not_divide(pool: RankPool, kind: str) -> None:
    notes = pool.run(accumulate, 4, (1, 1, 2, 2), kind, SIX_HEADS)[0]
    assert len(notes) == 1
    assert "by samples" in notes[0]
    assert "x*y=4" in notes[0]
    assert "6 heads" in notes[0]


def flops(shape: Shape, changes: dict[str, Any], sequences: int) -> tuple[int, int]:
    """Of a step, on this rank and in one process."""
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


def test_ranks_together_compute_as_much_as_one_process(pool: RankPool) -> None:
    """By heads, and by samples; of three samples each y rank works on all."""
    for changes, sequences, factor in (({}, 4, 1), (SIX_HEADS, 4, 1), (SIX_HEADS, 3, 2)):
        counts = pool.run(flops, 4, (1, 1, 2, 2), changes, sequences)
        attention = 2 * 12 * sequences * 8 * 8 * changes.get("hidden_size", 32)
        assert sum(mine for mine, _ in counts) == counts[0][1] + (factor - 1) * attention


def cores(shape: Shape, sequences: int) -> list[tuple[int, ...]]:
    """The shapes of queries that attention works on in one forward, with the default schedule."""
    grid = Grid.create(shape)
    model, _ = prepare(grid, "llama", SIX_HEADS)
    found = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(tuple(args[0].shape)))
    ids = batch(sequences, 8)[0]
    model(input_ids=ids)
    found.clear()
    model(input_ids=ids)
    return found


def test_a_batch_is_not_halved_where_that_would_repeat_attention(pool: RankPool) -> None:
    """Two samples are one for each y rank, and halves of them would be one for both."""
    blocks = 2
    assert pool.run(cores, 4, (1, 1, 2, 2), 2)[0] == blocks * [(1, 8, 24)]
    assert pool.run(cores, 4, (1, 1, 2, 2), 4)[0] == 2 * blocks * [(1, 8, 24)]


def own_loss(shape: Shape) -> None:
    """A loss of one's own from the logits, and all logits, also of halves that took turns."""
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
        loss = model(input_ids=ids[:3], labels=labels[:3]).loss  # three sequences have no halves
        torch.testing.assert_close(
            loss, stock(input_ids=ids[:3], labels=labels[:3]).loss, rtol=1e-5, atol=0.0
        )


def test_logits_of_a_rank_are_those_of_its_tokens(pool: RankPool) -> None:
    for shape in ((1, 1, 2, 2), (1, 1, 1, 4)):
        pool.run(own_loss, 4, shape)


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
    """With replicated activations, with token-sharded ones, and with inputs that come twice."""
    grid = Grid.create(shape)
    return [
        sent_bytes(grid, kind, changes, activations="replicated"),
        sent_bytes(grid, kind, changes),
        sent_bytes(grid, kind, changes, overlap=AGAIN),
    ]


HEADS_OF_8 = {"num_attention_heads": 8, "hidden_size": 64}


# Of eight heads each rank has one; of two key/value heads, four ranks have one.
@pytest.mark.parametrize(
    ("kind", "shape", "changes"),
    [
        ("llama", (1, 2, 2, 2), HEADS_OF_8 | {"num_key_value_heads": 2}),
        pytest.param("gpt2", (1, 1, 4, 2), HEADS_OF_8, marks=pytest.mark.nightly),
    ],
)
def test_no_byte_more_of_activations_is_sent(
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
            # A norm's weight is used for other tokens on each x rank: its gradient is summed, in a ring, once for both halves.
            norms = 4 * (2 * blocks + 1) * 2 * Fraction(x - 1, x) * h / y
            for sent in (kept, again):
                assert sent["x", "replica"] - replicated.get(("x", "replica"), 0) == norms
                assert ("y", "replica") not in sent
        # The inputs of attention, of the MLP and of the head; those of o and down.
        assert again["x", "regather"] == 4 * (2 * blocks + 1) * Fraction(x - 1, x) * tokens * h / y
        assert again["y", "regather"] == 4 * blocks * Fraction(y - 1, y) * tokens * (h + f) / x


# -- memory and FLOPs -----------------------------------------------------------------------------------------------------

B, S, H, F, HEADS, VOCABULARY_OF_8 = 2, 16, 64, 96, 8, 128


def small_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": H, "intermediate_size": F, "num_attention_heads": HEADS}
    config = LlamaConfig(**sizes, num_key_value_heads=HEADS, num_hidden_layers=1, vocab_size=VOCABULARY_OF_8)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def saved_and_flops(shape: Shape, keep_inputs: bool) -> tuple[int, int]:
    """Numbers that a block keeps for backward, each storage once, and the FLOPs of a step."""
    grid = Grid.create(shape)
    model = small_llama()
    overlap = ff.Overlap(keep_inputs=keep_inputs, interleave=False)
    ff.parallelize(model, grid, activations="token-sharded", overlap=overlap)
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
    numbers = sum(t.untyped_storage().nbytes() // 4 for p, t in kept.items() if p not in elsewhere)
    return numbers, flops.get_total_flops()


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), pytest.param((1, 1, 4, 2), marks=pytest.mark.nightly)])
def test_a_block_keeps_and_computes_its_share(pool: RankPool, shape: Shape) -> None:
    _, _, y, x = shape
    tokens = B * S
    # Two norms: their input, and that normalised. q, k, v and probabilities. Gate, silu(gate) and up.
    saved = tokens * (4 * H + 3 * H + S * HEADS + 3 * F) // (x * y)
    saved += 2 * tokens // x  # the norms' statistics, on each y rank
    # The inputs of q, k, v, of gate and up, of o and of down: whole over one axis, or cut over both.
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
    for checkpointing in ("none", "full"):
        model, _ = prepare(grid, "gpt2", rates, activation_checkpointing=checkpointing)

        def see(module: nn.Module, args: Any, output: Tensor) -> None:
            masks.append(output.detach() != 0)

        hook = model.transformer.h[0].attn.resid_dropout.register_forward_hook(see)
        loss = model(input_ids=ids, labels=labels).loss
        hook.remove()
        loss.backward()
        found.append(local_gradients(model))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
    return masks


def test_each_rank_drops_for_itself_and_the_same_when_recomputed(pool: RankPool) -> None:
    masks = pool.run(drop, 4, (1, 1, 2, 2))
    for mine, again in masks:
        assert torch.equal(mine, again)
    firsts = [mine for mine, _ in masks]
    assert all(not torch.equal(firsts[i], firsts[j]) for i in range(4) for j in range(i))


def attention_masks(shape: Shape, kv_heads: int) -> list[Tensor]:
    """What dropout left of the attention of each block."""
    grid = Grid.create(shape)
    changes = {"attention_dropout": 0.5, "attn_implementation": "eager", "num_key_value_heads": kv_heads}
    model, _ = prepare(grid, "llama", changes)
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, __, output: found.append(output[1].detach() != 0))
    model(input_ids=batch(1, 16)[0].expand(2, -1))
    return found


# Of four heads each rank has one, with a key/value head for itself, with its y neighbour, or with all.
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_other_heads_are_dropped_otherwise(pool: RankPool, kv_heads: int) -> None:
    masks = [blocks[0] for blocks in pool.run(attention_masks, 4, (1, 1, 2, 2), kv_heads)]
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


# -- what is refused ------------------------------------------------------------------------------------------------------


def refusals(shape: Shape) -> list[str]:
    grid = Grid.create(shape)
    model, _ = prepare(grid, "llama")
    ids, _ = batch(1, 12)
    attempts: list[Any] = [
        lambda: model(input_ids=ids[:, :11]),
        lambda: model(input_ids=ids, logits_to_keep=6),  # as many as an x rank has
    ]
    sliced, _ = prepare(grid, "llama")
    sliced.lm_head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:],))
    attempts.append(lambda: sliced(input_ids=ids))
    curious, _ = prepare(grid, "llama")
    attention = curious.model.layers[0].self_attn
    inner = attention.forward

    def forward(hidden_states: Tensor, **others: Any) -> Any:
        return inner(hidden_states=hidden_states * 2, **others)

    attention.forward = forward
    attempts.append(lambda: curious(input_ids=ids))
    listing, _ = prepare(grid, "llama")
    of_list = listing.model.layers[1].self_attn
    listed = of_list.forward

    def forward_of_list(hidden_states: Tensor, **others: Any) -> Any:
        return listed(hidden_states=torch.cat([hidden_states, hidden_states]), **others)

    of_list.forward = forward_of_list
    attempts.append(lambda: listing(input_ids=ids))
    again = build("llama")
    again.gradient_checkpointing_enable()
    attempts.append(lambda: ff.parallelize(again, grid, activations="token-sharded"))
    attempts.append(
        lambda: ff.parallelize(nn.Linear(4, 4), grid, roles={"": "colwise"}, activations="token-sharded")
    )
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    no_norm = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes))
    attempts.append(lambda: ff.parallelize(no_norm, grid, activations="token-sharded"))
    return [refusal(attempt) for attempt in attempts]


def refusal(attempt: Callable[[], Any]) -> str:
    with pytest.raises(UnsupportedError) as caught:
        attempt()
    return str(caught.value)


def masked_by_blocks() -> str:
    """Attention that is cut by samples is given a mask of all of them that cannot be cut."""
    model, _ = prepare(Grid.create((1, 1, 2, 2)), "llama", SIX_HEADS)
    ids = batch(2, 8)[0]
    mask = create_block_mask(lambda sample, head, q, k: q >= k, 2, None, 8, 8, device="cpu")
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True, prepend=True
    )
    return refusal(lambda: model(input_ids=ids))


def test_a_mask_that_cannot_be_cut_is_refused(pool: RankPool) -> None:
    said = pool.run(masked_by_blocks, 4)[0]
    assert "model.layers.0.self_attn is to work on some of the 2 samples" in said
    assert "attention_mask is a BlockMask" in said
    assert "attn_implementation='sdpa'" in said


def used_twice() -> str:
    """A norm's weight, of whose gradient each x rank has a part, is read as if each had all of it."""
    grid = Grid.create((1, 1, 1, 2))
    model, _ = prepare(grid, "llama")
    model(input_ids=batch(2, 12)[0])
    return refusal(lambda: local_weight(model.model.norm, "weight"))


def test_a_weight_whose_uses_do_not_agree_is_refused(pool: RankPool) -> None:
    said = pool.run(used_twice, 2)[0]
    assert "model.norm.weight is used twice" in said
    assert "('x',)" in said
    assert "weights='fsdp2'" in said


def test_what_cannot_be_cut_is_refused_by_name(pool: RankPool) -> None:
    said = pool.run(refusals, 4, (1, 1, 2, 2))[0]
    uneven, kept, sliced, curious, listing, again, no_model, no_norm = said
    assert "x=2 does not divide the 1 * 11 = 11 tokens" in uneven
    assert "logits_to_keep=6" in kept
    assert "lm_head got 1 tokens" in sliced
    assert "model.layers.0.self_attn" in curious
    assert "hidden_states * 2" in curious  # the line of code
    assert "model.layers.1.self_attn" in listing
    assert "torch.cat" in listing
    assert "activation_checkpointing='full'" in again
    assert "Linear" in no_model
    assert re.search(r"no norm .*modeling_openai.py:\d+: for .*self\.h", no_norm)
    for message in said:
        assert "activations='replicated'" in message
