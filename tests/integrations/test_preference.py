"""TRL's DPOTrainer on a grid: the numbers that it asks a model for, what it refuses, and that it trains as in one process."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from benchmarks.ranks import RankError, RankPool
from benchmarks.trainers import runs
from benchmarks.trainers.outcome import BAR, Shape, worst_error
from benchmarks.trainers.recipes import arguments, model, preferences
from fourfold import Grid, UnsupportedError
from fourfold.integrations.hf import trainer
from fourfold.integrations.hf.preference import answer_with_scores

VOCABULARY = 67  # which x does not divide


def scores_on_a_grid(shape: Shape) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )
    stock = LlamaForCausalLM(config)
    on_grid = copy.deepcopy(stock)
    ids = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :3] = labels[1, 6:] = -100
    logits, targets = stock(input_ids=ids).logits[:, :-1], labels[:, 1:]
    targets[2] = torch.where(targets[2] < 0, targets[2], logits[2].argmax(-1))  # some are the most likely
    labels[:, 1:] = targets
    log_p = logits.log_softmax(-1)
    here = targets >= 0
    wanted = {
        "log_probs": log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == targets,
        "log_sum_sq_probs": log_p.exp().square().sum(-1).log(),
    }
    assert 0 < int(wanted["is_top1"].sum()) < targets.numel()
    wanted["log_probs"].masked_fill(~here, 0).sum().backward()

    grid = Grid.create(shape)
    ff.parallelize(on_grid, grid)
    asked = False
    answer_with_scores(on_grid, grid, lambda: asked, has_metrics=True)
    rows = grid.local_rows(4)
    found = on_grid(input_ids=ids[rows], labels=labels[rows], fused_lm_head=True)
    for name, values in wanted.items():
        mine = torch.where(here, values, torch.zeros_like(values))[rows].detach()
        torch.testing.assert_close(found[name], mine, rtol=1e-5, atol=1e-5)
    alone = on_grid(input_ids=ids[rows], labels=labels[rows], fused_lm_head=True, scores_alone=True)
    assert torch.equal(alone.log_probs, found.log_probs)
    assert alone.entropy is None
    found.log_probs.sum().backward()
    norm = ff.clip_grad_norm_(on_grid.parameters(), math.inf, grid)
    torch.testing.assert_close(
        norm, nn.utils.get_total_norm([p.grad for p in stock.parameters()]), rtol=1e-5, atol=0
    )
    asked = True
    with pytest.raises(UnsupportedError, match=r"asked for logits.*trl 1\.15"):
        on_grid(input_ids=ids[rows])


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (1, 2, 1, 2)])
def test_a_model_answers_with_scores_in_place_of_logits(pool: RankPool, shape: Shape) -> None:
    pool.run(scores_on_a_grid, 4, shape)


# -- with TRL ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DPOTrainer", "DPOTrainer, LoRA"])
def test_it_trains_evaluates_and_resumes_as_in_one_process(name: str, pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    (stock,) = pool.run(runs.alone, 1, name)
    assert "eval_rewards/margins" in stock.logs
    for shape, resumes in (((1, 2, 1, 2), False), ((1, 1, 2, 2), True)):
        found = pool.run(runs.on_grid, 4, name, shape, str(tmp_path), None, resumes)[0]
        assert max(worst_error(found, stock)) <= BAR


def first_rewards(folder: str, lora: bool, on_meta: bool) -> tuple[float, float]:
    """The loss of the first step, and the largest reward, of a trainer without a ref_model."""
    from peft import LoraConfig

    grid = Grid.create((1, 2, 1, 2))
    given: dict[str, Any] = {"model": model(), "grid": grid}
    if on_meta:
        with torch.device("meta"):
            given["model"] = LlamaForCausalLM(given["model"].config)
        given["checkpoint"] = f"{folder}/model"
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)

    with runs.as_launched(torch.distributed.get_rank(), 4):
        run = preferences(trainer, folder, 4, **given)
        run.train()
    entry = next(entry for entry in run.state.log_history if "rewards/chosen" in entry)
    return entry["loss"], max(abs(entry["rewards/chosen"]), abs(entry["rewards/rejected"]))


@pytest.mark.nightly
@pytest.mark.parametrize(("lora", "on_meta"), [(False, False), (False, True), (True, True)])
def test_without_a_reference_it_is_the_first_model(
    lora: bool, on_meta: bool, pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    model().save_pretrained(tmp_path / "model")
    for loss, reward in pool.run(first_rewards, 4, str(tmp_path), lora, on_meta):
        assert loss == pytest.approx(math.log(2), rel=1e-5)
        assert reward < 1e-4


def losses(folder: str, given: str, dropout: float) -> list[float]:
    """The losses of a trainer whose adapters have dropout, which `DPOConfig.disable_dropout` switches off."""
    from peft import LoraConfig

    options: dict[str, Any] = {"parallel": {"lora": ff.Lora(rank=4, dropout=dropout)}}
    if given == "peft_config":
        options = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)}
    with runs.as_launched(torch.distributed.get_rank(), 2):
        run = preferences(trainer, folder, 4, model=model(), grid=Grid.create((1, 2, 1, 1)), **options)
        run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.nightly
@pytest.mark.parametrize("given", ["peft_config", "parallel"])
def test_disable_dropout_is_for_adapters_as_well(given: str, pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    with_dropout, without = (pool.run(losses, 2, str(tmp_path), given, share)[0] for share in (0.5, 0.0))
    assert with_dropout == without
    assert len(set(without)) > 1  # from the second step on an adapter changes what is computed


def refused(options: dict[str, Any], changes: dict[str, Any], folder: str) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    row = {"prompt": "w1", "chosen": " w2", "rejected": " w3"}
    with runs.as_launched(torch.distributed.get_rank(), 2):
        args = DPOConfig(**arguments(folder, 4) | changes)
        given: dict[str, Any] = {"model": model(), "args": args, "grid": (1, 2, 1, 1)}
        trainer(DPOTrainer)(train_dataset=Dataset.from_list([row] * 12), **given | options).train()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"compute_metrics": print}, {}, "compute_metrics"),
        ({"model": "a-model"}, {}, "pass a model"),
        ({}, {"precompute_ref_log_probs": True}, "precompute_ref_log_probs=True"),
        ({}, {"loss_type": ["aot"]}, "aot is not a mean over pairs"),
        ({}, {"sync_ref_model": True}, "sync_ref_model=True"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(
    options: dict[str, Any], changes: dict[str, Any], said: str, pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    with pytest.raises(RankError, match=said):
        pool.run(refused, 2, options, changes, str(tmp_path))
