"""Experts in the trainers of Hugging Face: the auxiliary loss of a micro-batch of all ranks, or a refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from benchmarks.ranks import RankPool
from benchmarks.trainers.recipes import chat
from benchmarks.trainers.runs import as_launched
from fourfold.errors import UnsupportedError
from fourfold.integrations.hf import trainer
from tests.models import VOCABULARY, build

MODEL: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
Shape = tuple[int, int, int, int]


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder: str, shape: Shape | None, count: int = 24) -> list[tuple[float, float]]:
    """(loss, norm of the gradients) of each step; without a shape by the stock trainer."""
    with as_launched(dist.get_rank(), dist.get_world_size()):
        args = TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            max_steps=3,
            logging_steps=1,
            per_device_train_batch_size=4 if shape is None else 4 // (shape[0] * shape[1]),
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            save_strategy="no",
            disable_tqdm=True,
        )
        kind, options = (Trainer, {}) if shape is None else (trainer(Trainer), {"grid": shape})
        run: Any = kind(model=build("qwen3_moe", **MODEL), args=args, train_dataset=rows(count), **options)
        run.train()
    return [(log["loss"], log["grad_norm"]) for log in run.state.log_history if "loss" in log]


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 1, 2)])
def test_the_auxiliary_loss_of_a_trainer(pool: RankPool, tmp_path: Path, shape: Shape) -> None:
    (expected,) = pool.run(train, 1, str(tmp_path / "stock"), None)
    assert len(expected) == 3
    for found in pool.run(train, 2, str(tmp_path / "grid"), shape):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def uneven(folder: str) -> str:
    with pytest.raises(UnsupportedError) as error:
        train(folder, (1, 2, 1, 1), count=23)
    return str(error.value)


@pytest.mark.nightly
def test_rows_that_make_the_last_batch_even_are_refused(pool: RankPool, tmp_path: Path) -> None:
    assert "use dataloader_drop_last=True" in pool.run(uneven, 2, str(tmp_path))[0]


def fine_tune(folder: str) -> str:
    with as_launched(0, 1), pytest.raises(UnsupportedError) as error:
        chat(trainer, folder, 4, lambda: build("qwen3_moe", **MODEL), packing=False, grid=(1, 1, 1, 1))
    return str(error.value)


@pytest.mark.nightly
def test_the_auxiliary_loss_of_trl_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """It is on by default for a model that has one."""
    pytest.importorskip("trl")
    (message,) = pool.run(fine_tune, 1, str(tmp_path))
    assert "router_aux_loss_coef=0.3" in message
    assert "use router_aux_loss_coef=0" in message
