"""The dry run: one rank's step in a world of any size in one process, by the code that trains."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.device_mesh import init_device_mesh

# What DTensor found out on one mesh it would use on the next of the same shape, whose groups are others (torch 2.13.0).
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold import untrusted_input as outside
from fourfold.dry_run.attention import FLEX_STAND_IN, whole_documents
from fourfold.dry_run.blocks import Growth, NotPeriodic, Repeated, expand, find_repeated, shallow_copy
from fourfold.dry_run.copies import RecordedCopies
from fourfold.dry_run.events import Operation, Peak, Start, Trace
from fourfold.dry_run.experts import ExpertLoad, experts_without_values
from fourfold.dry_run.loss_chunks import repeated_chunks
from fourfold.dry_run.micro_batches import TRACED, with_repeated
from fourfold.dry_run.recorder import Recorder, replaced
from fourfold.dry_run.show import show
from fourfold.errors import UnsupportedError, line_of_model
from fourfold.hf.anatomy import find_blocks
from fourfold.hf.init_recorder import restore_buffers
from fourfold.hf.packed_attention import FLEX, NAME, Attention, set_attention, use_packed_attention
from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.axes import AXES
from fourfold.mesh.grid import Grid
from fourfold.optim.adamw_bf16 import ADAMW
from fourfold.optim.clip import clip_grad_norm_
from fourfold.optim.kinds import Optimizer
from fourfold.optim.muon import ShardedMuon, split_matrices
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.checkpointing import ActivationCheckpointing, by_blocks
from fourfold.parallel.context.chunks import cut_sequences
from fourfold.parallel.loss.cross_entropy import count_labels
from fourfold.parallel.options import Options
from fourfold.parallel.parallelize import arrange
from fourfold.parallel.report import Report
from fourfold.weights.api import Precision, backend_of, evaluating, no_sync
from fourfold.weights.fsdp2 import Fsdp2Weights


@dataclass(frozen=True)
class DryRun:
    """The events of one rank's step, and its memory."""

    shape: tuple[int, int, int, int]
    traced: Trace = field(repr=False)  # without the micro-batches that were left out
    report: Report = field(repr=False)
    blocks_traced: tuple[int, int] | None = None  # (traced, all) of the blocks that are alike
    left_out: int = 0  # micro-batches like the second one

    @cached_property
    def trace(self) -> Trace:
        return with_repeated(self.traced, self.left_out)

    @property
    def peak(self) -> Peak:
        return self.trace.peak

    def __str__(self) -> str:
        data, z, y, x = self.shape
        title = f"{self.report.model} on (data={data}, z={z}, y={y}, x={x}): one rank's step, no device has run it"
        if self.blocks_traced is not None:
            title += "; {} of {} like blocks traced".format(*self.blocks_traced)
        return show(title, self.trace)

    @property
    def operations(self) -> list[Operation]:
        return [event for event in self.trace.events if isinstance(event, Operation)]

    @property
    def collectives(self) -> list[Start]:
        return [event for event in self.trace.events if isinstance(event, Start) and event.axis != "host"]


def dryrun(
    model: nn.Module | str | Path | Any,
    shape: tuple[int, int, int, int],
    *,
    sequences: int,
    length: int,
    micro_batches: int = 1,
    attention: Attention | None = None,
    optimizer: Optimizer = "adamw",
    target: str = "cuda",
    rank: int = 0,
    trace_all: bool = False,
    precision: Precision = "bf16",
    expert_load: ExpertLoad = 1.0,
    sequence_ranks: int = 1,
    **options_of_parallelize: Any,
) -> DryRun:
    """A training step of one rank of a grid, on no device: forward, backward, clipping, AdamW or Muon.

    ``model`` is built on ``meta``, or a Hugging Face configuration or its dict, or the path of its ``config.json``. ``sequences``
    of ``length`` tokens are the global batch, which each rank takes in ``micro_batches`` parts. Decisions are made for
    ``target`` devices. ``attention`` is that of packed documents, as in a run config; None: rows are not packed. Where ranks own experts, ``expert_load``
    is how many rows the rank has, as a multiple of the mean; "worst": all that routers can send to it. ``sequence_ranks`` neighbours along z share
    sequences, each of them one document. The other options are those of `parallelize`. Of what is alike only a few are traced, unless ``trace_all``: blocks,
    micro-batches, chunks of the loss. Raises what the real start would raise.

    Example:
        >>> run = dryrun(config, (64, 16, 1, 2), sequences=1024, length=16)  # 2,048 ranks; a path of a config.json does, too
        >>> run.peak.bytes < 2**20
        True
    """
    module = as_module(model)
    options = Options(precision=precision, **options_of_parallelize)
    note = ""
    if sequence_ranks > 1 and attention not in (None, "auto"):
        raise UnsupportedError(
            f"attention={attention!r} with sequence_ranks={sequence_ranks} is not supported; use 'auto'"
        )
    if attention is not None and sequence_ranks == 1:  # otherwise `parallelize` sets it
        note = use_packed_attention(module, attention, target, precision, is_compiled=bool(options.compile))
    used = module.config._attn_implementation if note else None  # type: ignore[union-attr]
    is_masked = bool(note) and used not in (NAME, FLEX)
    if note and not is_masked:
        # Without documents, which a dry run does not know, it is stock attention.
        set_attention(module, "sdpa" if used == NAME else FLEX_STAND_IN)
    world = fake_grid(shape, rank=rank, target=target, sequence_ranks=sequence_ranks)
    with world as grid, experts_without_values(expert_load):
        rows = grid.local_rows(sequences)
        own = rows.stop - rows.start
        if own % micro_batches:
            raise ValueError(
                f"{own} sequences of a rank do not divide into {micro_batches} micro-batches; use a divisor of {own}"
            )

        left_out = 0 if trace_all else max(0, micro_batches - TRACED)

        def run(
            model: nn.Module, checkpointing: Sequence[ActivationCheckpointing] | None = None
        ) -> tuple[Trace, Report]:
            copies = RecordedCopies() if target == "cuda" else None
            report, _ = arrange(
                model, grid, options, seed=0, checkpointing=checkpointing, is_dry=True, copies=copies
            )
            report = report.with_note(note) if note else report
            if report.compiled:
                report = report.with_note(
                    "operators and memory of the dry run are those of blocks that are not compiled"
                )
            step = _Step(
                model, grid, report, copies, optimizer, micro_batches, left_out, trace_all, is_masked
            )
            try:
                return step.trace(own, length), report
            except DataDependentOutputException as error:
                line = line_of_model(traceback.extract_tb(error.__traceback__))
                raise ValueError(
                    f"{report.model} reads a tensor's value, which only a device would know ({line}), so a dry run cannot follow "
                    "it; plan by formulas alone (fourfold plan --simulate 0, ff.plan(simulate=0))"
                ) from None

        # Muon redistributes matrices of several blocks together: its step does not grow block by block.
        is_periodic = not options.overlap.keep_bytes and optimizer != "muon"
        repeated = None if trace_all or not is_periodic else find_repeated(module)
        # Blocks of two kinds of recomputation are two lists of like blocks.
        blocks = len(find_blocks(module))
        lists = by_blocks(options.activation_checkpointing, options.checkpointed_blocks, blocks)
        if len(lists) == 1:  # also of a model with fewer blocks
            options = replace(options, activation_checkpointing=lists[0][0], checkpointed_blocks=None)
        if repeated is not None and len(lists) > 1 and (repeated.period, repeated.length) != (1, blocks):
            repeated = None
        if repeated is not None:
            if len(lists) == 1:
                lists = [(lists[0][0], repeated.length)]
            try:
                trace, report, traced = _expanded(module, repeated, lists, run)
                return DryRun(shape, trace, report, (traced, repeated.length), left_out)
            except NotPeriodic:
                pass  # then all of them
        trace, report = run(module)
        return DryRun(shape, trace, report, left_out=left_out)


_Lists = list[tuple[ActivationCheckpointing, int]]


def _expanded(
    module: nn.Module,
    repeated: Repeated,
    lists: _Lists,
    run: Callable[[nn.Module, Sequence[ActivationCheckpointing] | None], tuple[Trace, Report]],
) -> tuple[Trace, Report, int]:
    """The step of all blocks, from shallow copies of the model: one, and one with a period more of each list.

    Also the number of blocks of the first copy.
    """

    def trace(counts: Sequence[int]) -> tuple[Trace, Report]:
        kinds = [kind for (kind, _), count in zip(lists, counts, strict=True) for _ in range(count)]
        return run(shallow_copy(module, repeated, len(kinds)), kinds if len(lists) > 1 else None)

    least: list[int] = []
    longer: list[int] = []
    growths: list[Growth] = []
    for _, blocks in lists:
        enough = min(repeated.enough_of(blocks, first=sum(least)), blocks)
        periods = (blocks - enough) // repeated.period
        if periods:
            growths.append(Growth(sum(least), sum(longer), periods))
        least.append(enough)
        longer.append(enough + (repeated.period if periods else 0))
    if not growths:
        raise NotPeriodic("no list of blocks is longer than what has to be traced of it")
    fewer, report = trace(least)
    return expand(fewer, trace(longer)[0], repeated, growths), report, sum(least)


@contextmanager
def fake_grid(
    shape: tuple[int, int, int, int], *, rank: int = 0, target: str = "cuda", sequence_ranks: int = 1
) -> Iterator[Grid]:
    """The grid as ``rank`` sees it, decisions made for ``target`` devices; its tensors are on the CPU.

    The `fake` backend completes every collective at once and sends nothing.
    """
    world = math.prod(shape)
    if dist.is_initialized():
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already; a dry run makes a world of its "
            f"own, of {world} ranks: start it in another process"
        )
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of the {world} ranks of {shape}; use 0 to {world - 1}")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
        yield Grid.from_mesh(mesh, torch.device("cpu"), target=target, sequence_ranks=sequence_ranks)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


@dataclass
class _Step:
    """A training step of an arranged model, as a user writes it."""

    model: nn.Module
    grid: Grid
    report: Report
    copies: RecordedCopies | None
    optimizer_name: str
    micro_batches: int
    left_out: int  # micro-batches that are not run
    trace_all: bool
    is_masked: bool  # packed documents are kept apart by a mask

    def trace(self, rows: int, length: int) -> Trace:
        """The step on that many sequences of a rank, after the first ones."""
        from transformers import masking_utils

        model, grid = self.model, self.grid
        restore_buffers(model, grid.device)
        self.recorder = _recorder(model, grid, self.report)
        if self.copies is not None:
            self.copies.recorder = self.recorder
        # transformers reads off the positions whether documents are packed, which fake tensors do not have.
        found = replaced(
            masking_utils,
            "find_packed_sequence_indices",
            lambda position_ids: torch.zeros_like(position_ids) if self.is_masked else None,
        )
        # Chunks of two half-batches are interleaved: they are not one after another.
        traces_chunks = self.trace_all or self.report.interleaved
        chunks = nullcontext() if traces_chunks else repeated_chunks(self.recorder)
        with FakeTensorMode(allow_non_fake_inputs=True), found, chunks, whole_documents():
            model.to_empty(device=grid.device)
            with self.recorder.recording():
                for tensor in (*model.parameters(), *model.buffers()):
                    self.recorder.label(tensor, "parameters")
                self.optimizer = self._make_optimizer()
                self.inputs = self._batch(rows, length)
            if isinstance(backend_of(model), Fsdp2Weights):
                self._warm_up()
            else:
                # The first step finds the order of weights; with batch-split overlap it is that of the second.
                for _ in range(2 if self.report.interleaved else 1):
                    self._run(self.micro_batches - 1)
            self.recorder.start_over()
            self._run(self.left_out)
            return self.recorder.trace()

    def _batch(self, rows: int, length: int) -> dict[str, Tensor]:
        ids = torch.zeros(rows, length, dtype=torch.int64)
        is_cut = self.grid.sequence_ranks > 1
        return cut_sequences(ids, self.grid, labels=ids) if is_cut else {"input_ids": ids, "labels": ids}

    def _warm_up(self) -> None:
        """What a first step finds and allocates: linears that share an input, FSDP2's buffers, the state of the optimizer."""
        with self.recorder.recording():
            with evaluating(self.model):
                self.model(**self._batch(1, self.grid.x * self.grid.y * self.grid.sequence_ranks * 8))
            for parameter in self._trained():
                parameter.grad = parameter.detach()
            self.recorder.phase = "optimizer"
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        is_cuda = self.grid.target == "cuda"
        options: dict[str, Any] = {"lr": 1e-4}
        if self.optimizer_name == "muon":
            options["foreach"] = is_cuda  # torch's own choice
            matrices, others = split_matrices(self.model)
            groups: list[dict[str, Any]] = [{"params": matrices, "muon": True}, {"params": others}]
            return ShardedMuon(groups, self.model, self.report, **options)
        # As `fourfold train` has it.
        return sharded_optimizer(ADAMW[self.optimizer_name])(
            self._trained(), **options, foreach=False, fused=is_cuda
        )

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _run(self, left_out: int) -> None:
        with self.recorder.recording():
            self.recorder.phase = "forward"
            parts = zip(*(tensor.chunk(self.micro_batches) for tensor in self.inputs.values()), strict=True)
            *first, last = [dict(zip(self.inputs, part, strict=True)) for part in parts][left_out:]
            # One mean over all of them; a single one counts for itself. Labels of cut sequences are shifted already.
            items = {}
            if self.micro_batches > 1:
                is_whole = self.grid.sequence_ranks == 1
                items["num_items_in_batch"] = count_labels(self.inputs["labels"], self.grid, shift=is_whole)
            for part in first:
                with no_sync(self.model):
                    self._forward_and_backward(part | items)
            self._forward_and_backward(last | items)
            for parameter in self.model.parameters():
                self.recorder.label(parameter.grad, "gradients")
            self.recorder.phase = "clip"
            clip_grad_norm_(self.model.parameters(), 1.0, self.grid)
            self.recorder.phase = "optimizer"
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _forward_and_backward(self, inputs: dict[str, Tensor]) -> None:
        self.recorder.phase = "forward"
        loss = self.model(**inputs).loss
        self.recorder.phase = "backward"
        loss.backward()


def _recorder(model: nn.Module, grid: Grid, report: Report) -> Recorder:
    weights: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name, layout in report.layouts.items():
        around = name.rpartition(".")[0].rpartition(".")[0]
        weights[around].add(tuple(part.stop - part.start for part in layout.block(grid)))
    logits = None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        name = next(name for name, module in model.named_modules() if module is head)
        vocabulary = chunk(head.out_features, grid.x, grid.coordinate("x"))
        logits = (vocabulary.stop - vocabulary.start, name)
    return Recorder(model, grid, weights, logits)


def as_module(model: nn.Module | str | Path | Any) -> nn.Module:
    """The model on meta."""
    if isinstance(model, nn.Module):
        return model
    import transformers

    if isinstance(model, (str, Path)):
        if (isinstance(model, Path) or model.endswith(".json")) and not Path(model).exists():
            raise ValueError(f"there is no config {model}; give the path of a Hugging Face config.json")
        model = outside.load_model_config(model)
    elif isinstance(model, dict):
        sizes = {key: value for key, value in model.items() if key != "model_type"}
        model = transformers.AutoConfig.for_model(model["model_type"], **sizes)
    with torch.device("meta"):
        # A copy, because the attention of the model is set in its configuration.
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(
            deepcopy(model), dtype=torch.float32
        )
    return module
