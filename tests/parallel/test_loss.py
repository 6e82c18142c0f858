"""A loss that is not the loss of the global batch is rejected, however a model computes it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
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
from fourfold import Grid
from tests.models import LLAMA_LIKE, batch, build

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
        (auxiliary_loss, (0.5,), "MixtralForCausalLM computes its own loss, or adds to it"),
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
