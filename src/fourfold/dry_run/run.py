"""The dry run: one rank's step in a world of any size, by the code that trains."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from fourfold import untrusted_input as outside
from fourfold.dry_run.blocks import find_repeated, shallow_copy
from fourfold.dry_run.events import Operation, Start, Trace
from fourfold.dry_run.expand import NotPeriodic, expand
from fourfold.dry_run.memory import Peak, find_peak
from fourfold.dry_run.recorder import Recorder
from fourfold.dry_run.show import show
from fourfold.dry_run.world import fake_grid
from fourfold.errors import line_of_model
from fourfold.hf.init_recorder import restore_buffers
from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.grid import Grid
from fourfold.optim.clip import clip_grad_norm_
from fourfold.optim.muon import ShardedMuon, split_matrices
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.loss import count_labels
from fourfold.parallel.options import ActivationCheckpointing, ActivationsWanted, Options
from fourfold.parallel.parallelize import arrange
from fourfold.parallel.report import Report
from fourfold.weights.api import Precision, Weights, no_sync
from fourfold.weights.overlap import Overlap


@dataclass(frozen=True)
class DryRun:
    """The events of one rank's step, and its memory."""

    shape: tuple[int, int, int, int]
    trace: Trace = field(repr=False)
    report: Report = field(repr=False)
    blocks_traced: tuple[int, int] | None = None  # (traced, all) of the blocks that are alike

    @cached_property
    def peak(self) -> Peak:
        return find_peak(self.trace.before, self.trace.changes)

    def __str__(self) -> str:
        data, z, y, x = self.shape
        title = f"{self.report.model} on (data={data}, z={z}, y={y}, x={x}): one rank's step, no device has run it"
        if self.blocks_traced is not None:
            title += "; {} of {} like blocks traced".format(*self.blocks_traced)
        return show(title, self.trace, self.peak)

    @property
    def operations(self) -> list[Operation]:
        return [event for event in self.trace.events if isinstance(event, Operation)]

    @property
    def collectives(self) -> list[Start]:
        return [event for event in self.trace.events if isinstance(event, Start)]


def dryrun(
    model: nn.Module | str | Path | Any,
    shape: tuple[int, int, int, int],
    *,
    sequences: int,
    length: int,
    micro_batches: int = 1,
    roles: Mapping[str, str] | None = None,
    precision: Precision = "bf16",
    activations: ActivationsWanted = "auto",
    activation_checkpointing: ActivationCheckpointing = "none",
    weights: Weights = "auto",
    overlap: Overlap | None = None,
    max_norm: float = 1.0,
    optimizer: Literal["adamw", "muon"] = "adamw",
    target: str = "cuda",
    rank: int = 0,
    every_block: bool = False,
) -> DryRun:
    """A training step of one rank of a grid, on no device: forward, backward, clipping, AdamW or Muon.

    ``model`` is built on ``meta``, or a Hugging Face configuration, or the path of its ``config.json``. ``sequences``
    of ``length`` tokens are the global batch, which each rank takes in ``micro_batches`` parts. Decisions are made for
    ``target`` devices. If many blocks are alike, only a few are traced, unless ``every_block``. Raises what the real start
    would raise.

    Example:
        >>> run = dryrun(config, (64, 16, 1, 2), sequences=1024, length=16)  # 2,048 ranks; a path of a config.json does, too
        >>> run.peak.bytes < 2**20
        True
    """
    module = as_module(model)
    options = Options(roles, precision, activations, activation_checkpointing, weights, overlap or Overlap())
    with fake_grid(shape, rank=rank, target=target) as grid:
        rows = grid.local_rows(sequences)
        own = rows.stop - rows.start
        if own % micro_batches:
            raise ValueError(
                f"{own} sequences of a rank do not divide into {micro_batches} micro-batches; use a divisor of {own}"
            )

        def run(model: nn.Module) -> tuple[Trace, Report]:
            report, _ = arrange(model, grid, options, seed=0)
            try:
                trace = _trace(
                    model, grid, report, own // micro_batches, length, micro_batches, max_norm, optimizer
                )
            except DataDependentOutputException as error:
                line = line_of_model(traceback.extract_tb(error.__traceback__))
                raise ValueError(
                    f"{report.model} reads a tensor's value, which only a device would know ({line}), so a dry run cannot follow "
                    "it; plan by formulas alone (fourfold plan --simulate 0, ff.plan(simulate=0))"
                ) from None
            return trace, report

        # Muon redistributes matrices of several blocks together: its step does not grow block by block.
        is_periodic = not (overlap and overlap.keep_bytes) and optimizer == "adamw"
        repeated = None if every_block or not is_periodic else find_repeated(module)
        if repeated is not None:
            fewer, report = run(shallow_copy(module, repeated, repeated.traced))
            more, _ = run(shallow_copy(module, repeated, repeated.traced + repeated.period))
            try:
                trace = expand(
                    fewer,
                    more,
                    blocks_name=repeated.name,
                    period=repeated.period,
                    periods=(repeated.length - repeated.traced) // repeated.period,
                )
                return DryRun(shape, trace, report, (repeated.traced, repeated.length))
            except NotPeriodic:
                pass  # then all of them
        trace, report = run(module)
        return DryRun(shape, trace, report)


def _trace(
    model: nn.Module,
    grid: Grid,
    report: Report,
    rows: int,
    length: int,
    micro_batches: int,
    max_norm: float,
    optimizer: str,
) -> Trace:
    """The step of an arranged model after the first ones."""
    restore_buffers(model, grid.device)
    recorder = Recorder(model, grid)
    weights: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name, layout in report.layouts.items():
        around = name.rpartition(".")[0].rpartition(".")[0]
        weights[around].add(tuple(part.stop - part.start for part in layout.block(grid)))
    recorder.expect_weights(weights)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        name = next(name for name, module in model.named_modules() if module is head)
        config: Any = model.config
        vocabulary = chunk(config.get_text_config().vocab_size, grid.x, grid.coordinate("x"))
        recorder.expect_logits(vocabulary.stop - vocabulary.start, name)
    with FakeTensorMode(allow_non_fake_inputs=True), _unpacked():
        model.to_empty(device=grid.device)
        step = _Step(model, grid, recorder, rows, length, micro_batches, max_norm, report, optimizer)
        # The first step finds linears that share an input, a second the order of weights with batch-split overlap.
        for _ in range(2 if report.interleaved else 1):
            step()
        recorder.start_over()
        step()
        return recorder.trace()


class _Step:
    """A training step as a user writes it."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        recorder: Recorder,
        rows: int,
        length: int,
        micro_batches: int,
        max_norm: float,
        report: Report,
        optimizer: str,
    ) -> None:
        self.model, self.grid, self.recorder = model, grid, recorder
        self.micro_batches, self.max_norm = micro_batches, max_norm
        with recorder.recording():
            for tensor in (*model.parameters(), *model.buffers()):
                recorder.label(tensor, "parameters")
            options: dict[str, Any] = {"lr": 1e-4, "foreach": grid.target == "cuda"}  # torch's own choice
            if optimizer == "muon":
                matrices, others = split_matrices(model)
                groups: list[dict[str, Any]] = [{"params": matrices, "muon": True}, {"params": others}]
                self.optimizer: torch.optim.Optimizer = ShardedMuon(groups, model, report, **options)
            else:
                self.optimizer = sharded_optimizer(torch.optim.AdamW)(model.parameters(), **options)
            self.ids = torch.zeros(micro_batches * rows, length, dtype=torch.int64)

    def __call__(self) -> None:
        with self.recorder.recording():
            self.recorder.phase = "forward"
            *first, last = self.ids.chunk(self.micro_batches)
            # One mean over all of them; a single one counts for itself.
            items = {"num_items_in_batch": count_labels(self.ids, self.grid, shift=True)} if first else {}
            for ids in first:
                with no_sync(self.model):
                    self._forward_and_backward(ids, items)
            self._forward_and_backward(last, items)
            for parameter in self.model.parameters():
                self.recorder.label(parameter.grad, "gradients")
            self.recorder.phase = "clip"
            clip_grad_norm_(self.model.parameters(), self.max_norm, self.grid)
            self.recorder.phase = "optimizer"
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _forward_and_backward(self, ids: Tensor, items: dict[str, Tensor]) -> None:
        self.recorder.phase = "forward"
        loss = self.model(input_ids=ids, labels=ids, **items).loss
        self.recorder.phase = "backward"
        loss.backward()


def as_module(model: nn.Module | str | Path | Any) -> nn.Module:
    """The model on meta."""
    if isinstance(model, nn.Module):
        return model
    import transformers

    if isinstance(model, (str, Path)):
        if (isinstance(model, Path) or model.endswith(".json")) and not Path(model).exists():
            raise ValueError(f"there is no config {model}; give the path of a Hugging Face config.json")
        model = outside.load_model_config(model)
    with torch.device("meta"):
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(model)
    return module


@contextmanager
def _unpacked() -> Iterator[None]:
    """Sequences are not packed. transformers reads that off the positions, which fake tensors do not have."""
    import transformers.masking_utils as masks

    theirs = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = theirs
