"""The correction bias of routers after some steps: that of one process, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.experts.faults import FAULTS
from benchmarks.experts.ways import ROWS, Routing, Way, on_grid
from benchmarks.tiny_models import tiny_batch
from fourfold import Grid
from fourfold.hf.experts import is_experts
from fourfold.parallel.experts.load import CorrectionBias, ExpertLoad

RATE, STEPS = 0.05, 3
ROUTING = Routing("deepseek_v3")


def biases_of_one_process() -> list[Tensor]:
    """The experts' own arguments are counted."""
    model = ROUTING.build()
    batch, choices = tiny_batch(model, ROWS), dict[str, Tensor]()

    def note(name: str) -> Any:
        return lambda module, given: choices.__setitem__(name, given[1])

    for name, module in model.named_modules():
        if is_experts(module):
            module.register_forward_pre_hook(note(name))
    biases = [bias for name, bias in model.named_buffers() if name.endswith("correction_bias")]
    for _ in range(STEPS):
        model(**batch)
        for bias, chosen in zip(biases, choices.values(), strict=True):
            counts = torch.bincount(chosen.flatten(), minlength=bias.numel())
            bias += RATE * torch.sign(counts.sum() - bias.numel() * counts)
    return biases


def biases_on_grid(way: Way, fault: str | None = None) -> list[Tensor]:
    model = ROUTING.build()
    grid = Grid.create(way.shape, timeout_s=120)
    batch = {name: given[grid.local_rows(ROWS)] for name, given in tiny_batch(model, ROWS).items()}
    with FAULTS[fault].planted() if fault else nullcontext():
        report = on_grid(model, way, grid)
        load = ExpertLoad(model, report)
        bias = CorrectionBias(model, report, load)
        for _ in range(STEPS):
            with load.counting():
                loss = model(**batch).loss
            loss.backward()
            bias.update(load.take(), RATE)
    found = [model.get_buffer(name) for name in bias.names]
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in found]
