"""A short run of a run config on random tokens: the time of its steps, exposed communication, and memory.

The steps are those of `fourfold train`. Nothing is read: the weights are random, and so are the tokens, in documents as long
as a sequence. Nothing observes the steps whose time is measured; the last few are observed for their exposed communication.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.distributed as dist

from fourfold.config.schema import (
    CheckpointSection,
    DataSection,
    ModelSection,
    RunConfig,
    ScheduleSection,
    Source,
)
from fourfold.data.manifest import DatasetManifest
from fourfold.data.shards import ShardWriter, token_dtype
from fourfold.data.tokenizer import TokenizerInfo
from fourfold.mesh.agreements import broadcast_object, gather_objects
from fourfold.mesh.axes import AXES
from fourfold.mesh.grid import Grid
from fourfold.mesh.rendezvous import join_world
from fourfold.profiling.step_report import StepReport, measure_step
from fourfold.train.loop.garbage import GarbageCollection
from fourfold.train.loop.model import model_config
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import memory_bytes
from fourfold.train.observe.run_metadata import run_metadata
from fourfold.train.run import resolve_layout

WARM_UP = 3  # steps: connections, kernels, compilation
OBSERVED = 3
LEAST, MOST = 5, 50  # timed steps
_SAMPLES = 64  # of the random data, which are read again and again


@dataclass(frozen=True)
class Bench:
    """What was measured."""

    metadata: dict[str, Any]  # as the run.json of a run
    seconds: tuple[float, ...]  # of each timed step, on rank 0
    exposed_s: dict[str, float]  # by axis: the mean of the observed steps, on rank 0
    memory_bytes: int  # the most of all ranks

    @property
    def step_s(self) -> float:
        return median(self.seconds)


def bench(run: RunConfig, minutes: float) -> Bench | None:
    """Measure a run on all ranks, in about so many minutes; None on all ranks but the first."""
    if run.reliability.torchft_lighthouse is not None:
        raise ValueError(
            "a bench is one job, and reliability.torchft_lighthouse makes each replica a job of its own; leave it out"
        )
    until_s = time.monotonic() + 60 * minutes
    is_ours = not dist.is_initialized()
    if is_ours:
        join_world()
    with TemporaryDirectory() as folder:
        run = resolve_layout(on_random_tokens(run, Path(folder)))
        if run.grid.size != dist.get_world_size():
            raise ValueError(
                f"{dist.get_world_size()} ranks are running, and the layout of this batch uses {run.grid.size}; start "
                f"{run.grid.size}, or change batch.tokens"
            )
        found = _measure(run, until_s)
    if is_ours:
        dist.destroy_process_group()
    return found


def on_random_tokens(run: RunConfig, folder: Path) -> RunConfig:
    """The run with random weights, and with random tokens in a folder of this rank; it saves nothing."""
    given, length = run.model, run.data.sequence_length
    model = ModelSection(config=given.config or given.pretrained)
    vocabulary = int(model_config(model).get_text_config().vocab_size)
    write_random_tokens(folder, vocabulary, length)
    return run.model_copy(
        update={
            "model": model,
            "data": DataSection(sources=(Source(path=folder),), sequence_length=length),
            "schedule": ScheduleSection(kind="constant", steps=WARM_UP, warmup_steps=0),
            "checkpoints": CheckpointSection(resume=False),
            "evaluation": run.evaluation.model_copy(update={"sequences": 0}),
        }
    )


def write_random_tokens(folder: Path, vocabulary: int, length: int) -> None:
    """A prepared dataset, the same on every rank, whose documents are as long as a sequence."""
    drawn = np.random.default_rng(0)
    (folder / "train").mkdir()
    writer = ShardWriter(folder, "train/000000", token_dtype(vocabulary))
    for _ in range(_SAMPLES):
        writer.add(drawn.integers(vocabulary, size=length))
    writer.close()
    tokenizer = TokenizerInfo("random", vocabulary, 0)
    DatasetManifest(tokenizer, "random", 0, {"train": writer.shards, "validation": []}).save(folder)


class _Timer(Callback):
    """Keeps the results of steps, which are read at the end, and observes steps when told to."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.reports: list[StepReport] = []
        self.observes = False

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        if not self.observes:
            yield
            return
        with measure_step(trainer.grid) as report:
            yield
        self.reports.append(report)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.results.append(result)


def _measure(run: RunConfig, until_s: float) -> Bench | None:
    timer = _Timer()
    trainer = Trainer(run, Grid.create(run.shape), [GarbageCollection(), timer])
    trainer.train()
    step_s = timer.results[-1].seconds
    fitting = int((until_s - time.monotonic()) / step_s) - OBSERVED
    steps = broadcast_object(max(LEAST, min(MOST, fitting)))
    trainer.warn(
        f"{WARM_UP} steps to warm up are done; {steps + OBSERVED} more take about {(steps + OBSERVED) * step_s:.0f} s"
    )
    _train_more(trainer, steps)
    timed = timer.results[WARM_UP:]
    timer.observes = True
    _train_more(trainer, OBSERVED)
    most_bytes = max(gather_objects(memory_bytes(trainer.grid.device)))
    if not trainer.is_first:
        return None
    exposed_s: dict[str, float] = {
        axis: mean(report.exposed_s(axis) for report in timer.reports)
        for axis in reversed(AXES)
        if trainer.grid.size(axis) > 1
    }
    return Bench(run_metadata(trainer), tuple(result.seconds for result in timed), exposed_s, most_bytes)


def _train_more(trainer: Trainer, steps: int) -> None:
    schedule = trainer.run.schedule.model_copy(update={"steps": trainer.step + steps})
    trainer.run = trainer.run.model_copy(update={"schedule": schedule})
    trainer.train()
