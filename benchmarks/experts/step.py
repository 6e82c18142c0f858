"""How far two steps on a grid are from those of one process: losses, the auxiliary one among them, and every gradient."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

import fourfold as ff
from benchmarks.experts.faults import FAULTS
from benchmarks.experts.ways import ROWS, Routing, Way, on_grid
from benchmarks.tiny_models import tiny_batch
from fourfold import Grid
from fourfold.parallel.report import Report

LOSS_BAR = 1e-5
GRADIENT_BAR = 1e-4  # of the gradient's own largest entry


@dataclass(frozen=True)
class Errors:
    """The largest of two steps: of losses, the auxiliary one among them, and of gradients by their own largest entry."""

    loss: float
    gradient: float

    @property
    def holds(self) -> bool:
        return self.loss <= LOSS_BAR and self.gradient <= GRADIENT_BAR


def worst(errors: list[Errors]) -> Errors:
    return Errors(max(e.loss for e in errors), max(e.gradient for e in errors))


def step_errors(way: Way, routing: Routing, fault: str | None = None) -> Errors:
    """Of this rank."""
    stock, model = routing.build(), routing.build()
    batch = tiny_batch(stock, ROWS)
    with FAULTS[fault].planted() if fault else nullcontext():
        grid = Grid.create(way.shape, timeout_s=120)
        report = on_grid(model, way, grid)
        rows = grid.local_rows(ROWS)
        loss_error = gradient_error = 0.0
        for _ in range(2):  # in the second step weights come in the recorded order
            expected, found = stock(**batch), model(**{name: given[rows] for name, given in batch.items()})
            for output in (expected, found):
                output.loss.backward()
            pairs = [(expected.loss, found.loss)]
            if routing.has_aux_loss:
                pairs.append((expected.aux_loss, found.aux_loss))
            loss_error = max(loss_error, *(abs(b.item() / a.item() - 1) for a, b in pairs))
            gradient_error = max(gradient_error, _gradient_error(stock, model, report))
            torch.optim.SGD(stock.parameters(), lr=0.1).step()
            # On shards: new shapes of DTensors take seconds.
            ff.sharded_optimizer(torch.optim.SGD)(model.parameters(), lr=0.1).step()
            for trained in (stock, model):
                trained.zero_grad()
    return Errors(loss_error, gradient_error)


def _gradient_error(stock: nn.Module, model: nn.Module, report: Report) -> float:
    largest = 0.0
    whole = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        layout = report.layouts[name]
        if parameter.grad is None or layout.hf_name not in whole:
            continue
        local, expected = parameter.grad.to_local(), whole[layout.hf_name]
        scale = float(expected.abs().max())
        if local.numel() and scale > 0:
            off = local - layout.of(expected, layout.shard(report.grid))
            largest = max(largest, float(off.abs().max()) / scale)
    return largest
