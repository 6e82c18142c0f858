"""The loss is that of the full logits and the global batch; one that is not is rejected, however a model computes it."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import fourfold as ff
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_model
from fourfold import Grid
from tests.models import (
    LLAMA_LIKE,
    VOCABULARY,
    assert_shards_close,
    batch,
    build,
    gradients,
    local_gradients,
    random,
)

Shape = tuple[int, int, int, int]
SHAPE = (1, 2, 1, 1)


def other_loss() -> PreTrainedModel:
    return LlamaForTokenClassification(LlamaConfig(**LLAMA_LIKE, num_labels=3))


def own_loss() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=131, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
    )


def auxiliary_loss(coefficient: float) -> PreTrainedModel:
    return MixtralForCausalLM(
        MixtralConfig(
            **LLAMA_LIKE,
            num_local_experts=4,
            output_router_logits=bool(coefficient),
            router_aux_loss_coef=coefficient,
        )
    )


def other_auxiliary_loss() -> PreTrainedModel:
    """Of attention as well."""
    model = tiny_model(find_family("jetmoe"))
    model.config.output_router_logits = True
    return model


def loss_or_error(make: Callable[..., PreTrainedModel], *arguments: float) -> str:
    torch.manual_seed(0)
    grid = Grid.create(SHAPE)
    model = make(*arguments)
    ff.parallelize(model, grid)
    ids, _ = batch(4)
    ids = ids[grid.local_rows(4)]
    try:
        model(input_ids=ids, labels=ids % 3)
    except ff.UnsupportedError as error:
        return str(error)
    return "a loss"


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (other_loss, (), "LlamaForTokenClassification has the loss ForTokenClassification"),
        (own_loss, (), "T5ForConditionalGeneration computes its own loss"),
        (other_auxiliary_loss, (), "JetMoeForCausalLM computes its own loss, or adds to it"),
        (auxiliary_loss, (0.5,), "a loss"),
        (auxiliary_loss, (0.0,), "a loss"),
    ],
)
def test_only_the_loss_of_the_global_batch_is_returned(pool: RankPool, make, arguments, says) -> None:
    for answer in pool.run(loss_or_error, 2, make, *arguments):
        assert says in answer
        assert says == "a loss" or "ff.cross_entropy" in answer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.blocks[1].weight = self.blocks[0].weight


def tie_across_blocks() -> str:
    try:
        ff.parallelize(Tied(), Grid.create(SHAPE), weights="fsdp2")
    except ff.UnsupportedError as error:
        return str(error)
    return ""


def test_fsdp2_rejects_a_weight_shared_by_two_blocks(pool: RankPool) -> None:
    for answer in pool.run(tie_across_blocks, 2):
        assert "blocks.1.weight is tied to blocks.0.weight" in answer
        assert "untie" in answer


def counts() -> tuple[float, float, int]:
    grid = Grid.create(SHAPE)
    model = build("llama")
    ff.parallelize(model, grid)
    ids, labels = (t[grid.local_rows(4)] for t in batch(4))
    items = ff.count_labels(labels, grid, shift=True)
    plain = model(input_ids=ids, labels=labels).loss
    return float(plain), float(model(input_ids=ids, labels=labels, num_items_in_batch=items).loss), int(items)


def test_count_labels_gives_the_same_mean(pool: RankPool) -> None:
    for plain, counted, _ in pool.run(counts, 2):
        assert counted == pytest.approx(plain, rel=1e-6)


# -- the loss -----------------------------------------------------------------------------------------------------------


def exact_cross_entropy(
    logits: Tensor, labels: Tensor, softcap: float | None, z_loss: float, num_items: int | None
) -> tuple[Tensor, Tensor]:
    """In fp64, from all logits: the loss and its gradient."""
    wide = logits.double().requires_grad_()
    capped = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    counted = labels != -100
    total = nn.functional.cross_entropy(capped.flatten(0, -2), labels.flatten(), reduction="sum")
    total = total + z_loss * torch.logsumexp(capped, -1)[counted].square().sum()
    loss = total / (num_items or max(1, int(counted.sum())))
    loss.backward()
    assert wide.grad is not None
    return loss.detach(), wide.grad


OPTIONS: list[dict[str, Any]] = [
    {},
    {"z_loss": 1e-2},
    {"softcap": 5.0},
    {"softcap": 30.0, "z_loss": 1e-3, "num_items": 7},
]


def losses(shape: Shape, vocabulary: int) -> None:
    grid = Grid.create(shape)
    rows = grid.local_rows(4)
    for dtype, (case, options) in itertools.product((torch.float32, torch.bfloat16), enumerate(OPTIONS)):
        # Large enough that their exponentials overflow if the maximum is not subtracted.
        offset = 0.0 if "softcap" in options else 100.0
        logits = (4.0 * random(4, 6, vocabulary, seed=case) + offset).to(dtype)
        labels = torch.randint(vocabulary, (4, 6), generator=torch.Generator().manual_seed(case))
        labels[0, :5] = labels[1] = -100  # one label, none, all, all
        settings = {"softcap": None, "z_loss": 0.0, "num_items": None} | options
        expected, gradient = exact_cross_entropy(logits, labels, **settings)

        columns = [*logits[rows].split(-(-vocabulary // grid.x), dim=-1), *[logits[rows, :, :0]] * grid.x]
        index = grid.coordinate("x")
        local = columns[index].clone().requires_grad_()
        loss = ff.cross_entropy(local, labels[rows], grid, vocab_size=vocabulary, **options)
        loss.backward()
        first = -(-vocabulary // grid.x) * index
        part = gradient[rows, :, first : first + local.shape[-1]]
        bar = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        loss_bar = bar if "softcap" in options else 1e-5  # capped in the precision of the logits
        torch.testing.assert_close(loss.double(), expected, rtol=loss_bar, atol=0.0)
        assert local.grad is not None
        assert local.grad.dtype == dtype
        largest = float(gradient.abs().max())
        torch.testing.assert_close(local.grad.double(), part, rtol=bar, atol=bar * largest)
        gathered = ff.full_logits(local, grid, vocab_size=vocabulary, batch=local.shape[:-1])
        torch.testing.assert_close(gathered, logits[rows], rtol=0.0, atol=0.0)

    nothing = torch.full((4, 6), -100)[rows]
    loss = ff.cross_entropy(local, nothing, grid, vocab_size=vocabulary)
    assert loss.item() == 0.0
    assert ff.count_labels(labels[rows], grid).item() == int((labels != -100).sum())


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (2, 2, 1, 1)])
@pytest.mark.parametrize("vocabulary", [131, 3])
def test_cross_entropy_matches_that_of_the_full_logits(pool: RankPool, shape: Shape, vocabulary: int) -> None:
    pool.run(losses, 4, shape, vocabulary)


def model_losses(shape: Shape) -> None:
    grid = Grid.create(shape)
    stock = build("llama")
    model = copy.deepcopy(stock)
    ff.parallelize(model, grid)
    ids, labels = batch(4)
    rows = grid.local_rows(len(ids))
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    calls: list[dict[str, Any]] = [
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": 17},
        {"labels": labels, "num_items_in_batch": torch.tensor(17)},
        {"labels": labels, "shift_labels": shifted},
    ]
    for options in calls:
        local = {k: v[rows] if k.endswith("labels") else v for k, v in options.items()}
        expected = stock(input_ids=ids, **options)
        found = model(input_ids=ids[rows], **local)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0.0)
    logits = ff.full_logits(found.logits, grid, vocab_size=VOCABULARY, batch=ids[rows].shape)
    torch.testing.assert_close(logits, expected.logits[rows], rtol=1e-4, atol=1e-5)
    # The loss computed from the model's logits.
    own = ff.cross_entropy(found.logits, shifted[rows], grid, vocab_size=VOCABULARY)
    torch.testing.assert_close(own, expected.loss, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (2, 1, 1, 2), (1, 2, 2, 1)])
def test_loss_of_a_hugging_face_model_is_the_loss_of_the_global_batch(pool: RankPool, shape: Shape) -> None:
    pool.run(model_losses, 4, shape)


# -- ids outside the vocabulary, vocab_size not given ---------------------------------------------------------


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def outside_the_vocabulary(shape: Shape) -> tuple[str, str, str]:
    grid = Grid.create(shape)
    model = build("llama")
    ff.parallelize(model, grid)
    ids, _ = batch(4)
    ids = ids[grid.local_rows(4)]
    beyond = ids.clone()
    beyond[0, 3] = VOCABULARY  # stock PyTorch raises an IndexError here
    return (
        message_of(lambda: model(input_ids=beyond)),
        message_of(lambda: model(input_ids=ids, labels=beyond)),
        message_of(lambda: ff.cross_entropy(model(input_ids=ids).logits, beyond, grid)),
    )


def test_ids_and_labels_outside_the_vocabulary_are_rejected(pool: RankPool) -> None:
    for messages in pool.run(outside_the_vocabulary, 4, (1, 1, 2, 2)):
        assert [
            "input id of model.embed_tokens" in messages[0],
            "label" in messages[1],
            "label" in messages[2],
        ] == [True] * 3


def without_vocab_size(shape: Shape) -> tuple[float, float]:
    grid = Grid.create(shape)
    logits, labels = random(2, 3, 63), torch.randint(63, (2, 3), generator=torch.Generator().manual_seed(1))
    own = logits.chunk(grid.x, dim=-1)[grid.coordinate("x")]  # 32 columns and 31
    gathered = ff.full_logits(own, grid, batch=labels.shape)
    assert torch.equal(gathered, logits)
    right = nn.functional.cross_entropy(logits.view(-1, 63), labels.view(-1))
    return float(ff.cross_entropy(own, labels, grid)), float(right)


def test_vocab_size_is_optional_also_if_x_does_not_divide_it(pool: RankPool) -> None:
    for ours, right in pool.run(without_vocab_size, 2, (1, 1, 1, 2)):
        assert ours == pytest.approx(right, rel=1e-6)


def preference(log_probs: Tensor, pairs: int) -> Tensor:
    """A loss of pairs of rows, as DPO has."""
    of_rows = log_probs.sum(-1)
    return -nn.functional.logsigmoid(0.3 * (of_rows[::2] - of_rows[1::2])).sum() / pairs


def preferences(shape: Shape) -> None:
    grid, stock, model = Grid.create(shape), build("llama"), build("llama")
    ids, given = batch(8)
    labels = nn.functional.pad(given, (0, 1), value=-100)[:, 1:]
    scores = (
        stock(input_ids=ids).logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    )
    wanted = torch.where(labels >= 0, scores, 0.0)
    preference(wanted, 4).backward()

    report = ff.parallelize(model, grid, weights="streamed")
    rows = grid.local_rows(8)
    found = ff.token_log_probs(model(input_ids=ids[rows]).logits, labels[rows], grid, vocab_size=VOCABULARY)
    torch.testing.assert_close(found, wanted[rows].detach(), rtol=1e-5, atol=1e-5)
    preference(found, 4).backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 2, 1)])
def test_losses_of_ones_own_are_made_of_log_probabilities(pool: RankPool, shape: Shape) -> None:
    pool.run(preferences, int(torch.tensor(shape).prod()), shape)
