"""Losses of training steps, in one piece or across restarts on other grids with experts elsewhere, against one process.

Where the scores of two experts differ by less than rounding, a token may choose another one on a grid than in one process. In the steps here none does:
with other batches or rates that can happen, and losses then differ from that step on.
"""

from __future__ import annotations

from pathlib import Path

import torch

import fourfold as ff
from benchmarks.experts.ways import ROWS, Routing, Way, on_grid
from fourfold import Grid
from fourfold.checkpoint import Checkpoints, TrainState

ROUTING = Routing()
LENGTH, VOCABULARY = 16, 131


def batch_of(step: int) -> torch.Tensor:
    """One of four batches, so that the loss falls."""
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step % 4))


def adamw(parameters: object, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    # A large epsilon, because the update of a gradient of rounding noise is as large as others otherwise.
    return kind(parameters, lr=2e-3, eps=1e-4)  # type: ignore[call-arg]


def losses_of_one_process(steps: int) -> list[float]:
    model = ROUTING.build()
    optimizer, losses = adamw(model.parameters(), torch.optim.AdamW), []
    for step in range(steps):
        ids = batch_of(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_on_grid(way: Way, until: int, folder: Path | None = None) -> list[float]:
    """From the checkpoint in ``folder``, if there is one, which then has one of step ``until``."""
    model, grid = ROUTING.build(), Grid.create(way.shape, timeout_s=120)
    report = on_grid(model, way, grid)
    optimizer = adamw(model.parameters(), ff.sharded_optimizer(torch.optim.AdamW))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    training = TrainState(model, optimizer, report, schedule)
    rows, losses = grid.local_rows(ROWS), []
    checkpoints = None if folder is None else Checkpoints(str(folder))
    if checkpoints is not None and folder is not None and any(folder.iterdir()):
        checkpoints.load(training)
    while training.step < until:
        ids = batch_of(training.step)[rows]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step += 1
        losses.append(loss.item())
    if checkpoints is not None:
        with checkpoints:
            checkpoints.save(training)
    return losses
