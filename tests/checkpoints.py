"""A small run to save and load."""

from typing import Any

import torch
from torch import Tensor

import fourfold as ff
from fourfold import Grid
from fourfold.checkpoint import Checkpoints, TrainState
from tests.models import batch, build, local_parameters

Shape = tuple[int, int, int, int]


def start(
    shape: Shape = (1, 1, 1, 1), kind: str = "llama", weights: Any = "auto", **changes: Any
) -> TrainState:
    """A model on the grid with an optimizer and a schedule, before its first step."""
    model = build(kind, **changes)
    report = ff.parallelize(model, Grid.create(shape), weights=weights)
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    return TrainState(model, optimizer, report, schedule, config={"run": "a test"})


def advance(training: TrainState) -> float:
    ids, labels = batch(8, seed=training.step)
    rows = training.report.grid.local_rows(len(ids))
    loss = training.model(input_ids=ids[rows], labels=labels[rows]).loss
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.schedule.step()
    training.step += 1
    training.data["sequences"] = training.step * len(ids)
    return float(loss)


def numbers(training: TrainState) -> dict[str, Tensor]:
    """All tensors of this rank that a checkpoint has to restore."""
    found = {name: tensor.clone() for name, tensor in local_parameters(training.model).items()}
    names = {id(p): name for name, p in training.model.named_parameters()}
    for parameter, shard in training.optimizer._pairs:  # type: ignore[attr-defined]
        for kind, value in training.optimizer.state[shard].items():
            found[f"{names[id(parameter)]}: {kind}"] = value.clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def save_steps(folder: str, shape: Shape, steps: int, **options: Any) -> None:
    """Checkpoints of the steps 1, 2, ..."""
    training = start(shape)
    with Checkpoints(folder, **options) as checkpoints:
        for _ in range(steps):
            advance(training)
            checkpoints.save(training)
