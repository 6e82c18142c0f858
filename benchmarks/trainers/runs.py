"""A trainer in one process, and on a rank of a grid."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PrinterCallback

from benchmarks.trainers.faults import planted
from benchmarks.trainers.loops import fabric, lightning
from benchmarks.trainers.outcome import Outcome, Shape, outcome
from benchmarks.trainers.recipes import MAKERS, ROWS, STEPS

LOOPS = {"Lightning": lightning, "Fabric": fabric}
NAMES = (*MAKERS, *LOOPS)


def alone(name: str) -> Outcome:
    """The stock trainer in one process, beside which there is no other."""
    with tempfile.TemporaryDirectory() as folder, as_launched(0, 1):
        if name in LOOPS:
            return LOOPS[name](None, Path(folder))
        trainer = MAKERS[name](lambda kind: kind, folder, ROWS)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return outcome(trainer, Path(folder) / "final")


def on_grid(name: str, shape: Shape, folder: str, fault: str | None, resumes: bool) -> Outcome:
    """On a rank: train from the start, or from the checkpoint in the middle."""
    from fourfold import Grid
    from fourfold.integrations.hf import trainer as on_a_grid

    grid = Grid.create(shape, timeout_s=300)
    launched = as_launched(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if name in LOOPS:
        with launched:
            return LOOPS[name](shape, Path(folder))
    with launched, planted(fault):
        trainer = MAKERS[name](on_a_grid, folder, ROWS // grid.batch_ranks, grid=grid)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resumes else None)
        found = outcome(trainer, Path(folder) / "final")
    return found if torch.distributed.get_rank() == 0 else Outcome(found.logs, {})


@contextmanager
def as_launched(rank: int, ranks: int) -> Iterator[None]:
    """accelerate reads a launcher's variables, and once in a process; a rank of a pool runs other things after it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = ("LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    before = {name: os.environ.pop(name, None) for name in names}
    if ranks > 1:
        os.environ |= dict(zip(names, map(str, (rank, rank, ranks, ranks)), strict=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
