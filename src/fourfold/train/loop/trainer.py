"""The training loop: batches in, steps out, everything else in callbacks.

    for each step   learning rate of the schedule; this rank's rows in micro-batches, gradients reduced with the last;
                    clipping; optimizer; callbacks; checkpoint

A step depends on (seed, step) and the data alone, so a resumed run, also on another grid, continues as it would have
without the interruption.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoint.save import Checkpoints
from fourfold.checkpoint.state import TrainState
from fourfold.config.schema import RunConfig
from fourfold.data.loader import Batch, Loader
from fourfold.data.manifest import Split
from fourfold.data.mixture import Mixture, check_identity, open_mixture
from fourfold.hf.packed_attention import packed_inputs
from fourfold.mesh.clock import Clock, clock_of
from fourfold.mesh.grid import Grid
from fourfold.optim.clip import clip_grad_norm_
from fourfold.parallel.context.chunks import cut_sequences
from fourfold.parallel.dropout import seed_ranks
from fourfold.parallel.loss.cross_entropy import count_labels
from fourfold.train.loop.experts import ExpertTraining
from fourfold.train.loop.model import build_model
from fourfold.train.loop.optimizers import build_optimizer, learning_rate_factor, update
from fourfold.train.loop.packing import check_documents_stay_apart
from fourfold.train.recovery.replicas import SingleReplica
from fourfold.train.recovery.rollback import Rollbacks
from fourfold.train.recovery.stop import StopRequest
from fourfold.train.recovery.torchft_manager import TorchFTManager
from fourfold.weights.api import no_sync


@dataclass
class StepResult:
    """The result of a step, for callbacks. Reading a tensor or the time waits for the device on CUDA."""

    step: int  # steps done, including this one
    loss: Tensor
    gradient_norm: Tensor | None
    learning_rate: float
    tokens: int
    clock: Clock
    start: Any  # marks of that clock
    end: Any
    aux_loss: Tensor | None = None  # of routers, before its coefficient; it is not in the loss
    metrics: dict[str, float] = field(default_factory=dict)  # what callbacks add for the callbacks after them

    @property
    def seconds(self) -> float:
        return self.clock.elapsed_s(self.start, self.end)


class Callback:
    """Code that runs alongside the steps; override what is needed."""

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step, when the model and a checkpoint are loaded."""

    def around_run(self, trainer: Trainer) -> AbstractContextManager[Any]:
        """Entered before the first `on_start`, left after the last `on_end` and on errors."""
        return nullcontext()

    def around_step(self, trainer: Trainer) -> AbstractContextManager[Any]:
        """Entered before each step, left after it."""
        return nullcontext()

    def on_gradients(self, trainer: Trainer) -> None:
        """Called after backward, before clipping."""

    def should_skip(self, trainer: Trainer, loss: Tensor, norm: Tensor | None) -> Tensor | None:
        """A flag, the same on all ranks: should this step leave the weights unchanged? None: no opinion."""
        return None

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Called after each step, with its loss, its gradient norm and its time."""

    def on_save(self, trainer: Trainer) -> None:
        """Called before a checkpoint is saved: put state that the run needs to resume into `TrainState.beside`.

        A callback that requests a rollback here (`Trainer.rollbacks`), on all ranks, prevents the save.
        """

    def on_rollback(self, trainer: Trainer) -> None:
        """Called after the run was set to another step, from a checkpoint or a copy of another replica's state."""

    def on_end(self, trainer: Trainer) -> None:
        """Called after the last step of this start."""


class Trainer:
    """A run on its grid. Construct and call it on all ranks alike."""

    def __init__(self, run: RunConfig, grid: Grid, callbacks: Sequence[Callback] = ()) -> None:
        # `fourfold train` has chosen by the memory of the devices before.
        run = run.model_copy(update={"engine": run.engine.without_auto()})
        if grid.sequence_ranks != run.sequence_ranks:
            raise ValueError(
                f"the grid has sequence_ranks={grid.sequence_ranks}, and the run config {run.sequence_ranks}; pass "
                "Grid.create(run.shape, sequence_ranks=run.sequence_ranks)"
            )
        self.run, self.grid, self.callbacks = run, grid, list(callbacks)
        self.is_first = dist.get_rank() == 0
        self.replicas = (
            SingleReplica() if run.reliability.torchft_lighthouse is None else TorchFTManager(run, grid, self)
        )
        batch = grid.local_rows(run.sequences)  # raises if the batch does not divide over the ranks
        rows = batch.stop - batch.start
        self.micro_batch_rows = micro_batch_rows(run, rows)
        self.micro_batches = -(-rows // (self.replicas.planned * self.micro_batch_rows))
        self.mixture = open_data(run, "train")
        self.loader = Loader(self.mixture, grid, run.sequences, prefetch_batches=run.data.prefetch_batches)
        self.model, self.report = build_model(
            run.model, run.engine, grid, run.seed, run.own_length, run.lora, run.experts
        )
        self.experts = ExpertTraining(run.experts, self.model, self.report)
        check_documents_stay_apart(
            self.model,
            grid,
            rows=self.micro_batch_rows,
            vocab_size=int(self.model.config.vocab_size),  # type: ignore[union-attr,arg-type]
        )
        self.optimizer = build_optimizer(self.model, run.optimizer, self.report)
        self.training = TrainState(
            self.model,
            self.optimizer,
            self.report,
            seed=run.seed,
            data={"samples": 0, **self.mixture.identity},
            config=run.model_dump(mode="json"),
        )
        self.timed_s: defaultdict[str, float] = defaultdict(float)  # on this host, by activity
        self.activity = "the start"  # for the report of a hang
        self.rollbacks = Rollbacks()
        self._clock = clock_of(grid.device.type)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.training.step

    @property
    def is_done(self) -> bool:
        return self.step >= self.run.schedule.steps

    def train(self, checkpoints: Checkpoints | None = None, stop: StopRequest | None = None) -> None:
        """Train from the newest checkpoint, if there is one, to the end of the schedule or until a request to stop."""
        with ExitStack() as around:
            for callback in self.callbacks:
                around.enter_context(callback.around_run(self))
            self._train(checkpoints, stop)

    def _train(self, checkpoints: Checkpoints | None, stop: StopRequest | None) -> None:
        if checkpoints is not None:
            self._resume(checkpoints)
        for callback in self.callbacks:
            callback.on_start(self)
        batches = self.replicas.batches(self.training, self.loader)
        stops = False
        while not self.is_done and not stops:
            result = self._step(batches)
            if result is None:
                continue
            if checkpoints is not None:
                self._wait_for_late(checkpoints)
            self.activity = "callbacks"
            for callback in self.callbacks:
                callback.on_step(self, result)
            stops = stop is not None and stop.agreed()
            is_due = stops or self.saves_after(self.step)
            if checkpoints is not None and is_due and not self.rollbacks.is_requested:
                self._save(checkpoints)
            if self.rollbacks.is_requested:
                batches = self._roll_back(checkpoints)
        self.replicas.close()
        if checkpoints is not None:
            with self.timed("checkpoint"):
                checkpoints.wait()
        for callback in self.callbacks:
            callback.on_end(self)

    def _save(self, checkpoints: Checkpoints) -> None:
        with self.timed("checkpoint"):
            if not self.replicas.saves(self.step, checkpoints):
                return
            self.before_save()
            if not self.rollbacks.is_requested:
                checkpoints.save(self.training)

    def before_save(self) -> None:
        for callback in self.callbacks:
            callback.on_save(self)

    def after_rollback(self) -> None:
        for callback in self.callbacks:
            callback.on_rollback(self)

    def _wait_for_late(self, checkpoints: Checkpoints) -> None:
        """Bound the steps that are done while a checkpoint is written: they are lost if it is not finished."""
        within = self.run.checkpoints.max_async_lag_steps
        if within is not None and checkpoints.saving is not None and self.step - checkpoints.saving >= within:
            with self.timed("checkpoint"):
                checkpoints.wait()

    def _roll_back(self, checkpoints: Checkpoints | None) -> Iterator[Batch]:
        if self.run.reliability.torchft_lighthouse is not None:
            raise RuntimeError(
                f"step {self.step}: {self.rollbacks.reason}; with reliability.torchft_lighthouse a run does not roll back by itself: "
                "restarted, it resumes from its newest checkpoint"
            )
        with self.timed("rollback"):
            self.warn(self.rollbacks.roll_back(self.training, checkpoints))
        self.after_rollback()
        return self.replicas.batches(self.training, self.loader)

    def saves_after(self, step: int) -> bool:
        """Is a checkpoint due after this step? Every ``checkpoints.every_steps`` steps, and at the end."""
        every = self.run.checkpoints.every_steps
        return step >= self.run.schedule.steps or (every is not None and step % every == 0)

    def warn(self, message: str) -> None:
        """Print to standard error, on rank 0."""
        if self.is_first:
            print(message, file=sys.stderr, flush=True)

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Measure the time that this host spends on something other than computing steps."""
        self.activity = activity
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.timed_s[activity] += time.perf_counter() - start_s

    def _resume(self, checkpoints: Checkpoints) -> None:
        if not self.run.checkpoints.resume:
            if found := checkpoints.steps():
                raise ValueError(
                    f"checkpoints.resume=false begins at step 0, but {checkpoints.root} has step-{found[-1]} of another run, and "
                    "the two would mix; use another checkpoints.folder, move it away, or resume"
                )
            return
        identity = dict(self.mixture.identity)
        # Options of the optimizer, as the learning rate, are those of the run config, not of the checkpoint.
        groups = self.optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        if checkpoints.load(self.training) is not None:
            for group, own in zip(groups, options, strict=True):
                group.update(own)
            saved = {key: value for key, value in self.training.data.items() if key != "samples"}
            check_identity(saved, identity)

    def _step(self, batches: Iterator[Batch]) -> StepResult | None:
        """One step; None if another replica was lost during it: the weights are unchanged."""
        start = self._clock.mark()
        self.replicas.start_step()
        with self.timed("data"):
            batch = next(batches)
        lr = self.run.optimizer.lr * learning_rate_factor(self.run.schedule, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        seed_ranks(self.grid, self.run.seed, self.step, replica=self.replicas.index)
        with ExitStack() as around:
            for callback in self.callbacks:
                around.enter_context(callback.around_step(self))
            self.activity = "forward and backward"
            loss, aux_loss = self._forward_and_backward(batch)
            if not self.replicas.sum_gradients(loss):
                self.optimizer.zero_grad()
                return None
            for callback in self.callbacks:
                callback.on_gradients(self)
            self.activity = "clipping"
            norm, max_norm = None, self.run.optimizer.grad_clip_norm
            if max_norm is not None or self.run.reliability.skip_bad_steps:
                norm = clip_grad_norm_(self.model.parameters(), max_norm or math.inf, self.grid)
            self.activity = "the optimizer"
            opinions = [callback.should_skip(self, loss, norm) for callback in self.callbacks]
            flags = [flag for flag in opinions if flag is not None]
            update(self.optimizer, flags)
            self.experts.update_bias(flags)
            self.optimizer.zero_grad()
        self.training.step += 1
        self.training.data["samples"] = batch.next_sample
        end = self._clock.mark()
        tokens, metrics = self.run.batch.tokens, self.replicas.metrics()
        return StepResult(self.step, loss, norm, lr, tokens, self._clock, start, end, aux_loss, metrics)

    def _forward_and_backward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The mean loss over the global batch, and the auxiliary one; gradients of all micro-batches are reduced with the last."""
        counted, parts = self.split(batch)
        counted = self.replicas.sum(counted).clamp(min=1)
        total = torch.zeros((), device=self.grid.device)
        total_aux = torch.zeros_like(total) if self.experts.has_aux_loss else None
        self.experts.start_step(len(parts))
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1
            with nullcontext() if is_last else no_sync(self.model):
                with self.experts.counting():
                    output = self.model(**{**part, **self.experts.inputs}, num_items_in_batch=counted)
                output.loss.backward()
            loss, aux = self.experts.losses(output)
            total += loss
            if total_aux is not None and aux is not None:
                total_aux += aux
        return total, total_aux

    def split(self, batch: Batch) -> tuple[Tensor, list[dict[str, Any]]]:
        """(the number of labels in the global batch, this rank's inputs in micro-batches on its device)."""
        device, rows, is_cut = self.grid.device, self.micro_batch_rows, self.grid.sequence_ranks > 1
        given_inputs = batch.inputs
        if is_cut:
            ids, labels, own = (given_inputs[name] for name in ("input_ids", "labels", "position_ids"))
            given_inputs = cut_sequences(ids, self.grid, labels=labels, position_ids=own)
        positions = given_inputs["position_ids"].split(rows)
        inputs = {
            name: given.to(device, non_blocking=True)
            for name, given in given_inputs.items()
            if name != "position_ids"
        }
        # Those of a cut sequence are shifted already.
        counted = count_labels(inputs["labels"], self.grid, shift=not is_cut, at_least=0)
        parts = zip(*(given.split(rows) for given in inputs.values()), strict=True)
        return counted, [
            dict(zip(inputs, part, strict=True))
            | packed_inputs(own, device)
            | self.experts.inputs_of_evaluation
            for part, own in zip(parts, positions, strict=True)
        ]


def open_data(run: RunConfig, split: Split) -> Mixture:
    sources = [(source.path, source.weight) for source in run.data.sources]
    return open_mixture(sources, length=run.data.sequence_length, seed=run.seed, split=split)


def micro_batch_rows(run: RunConfig, rows: int) -> int:
    """Rows of a micro-batch of a rank. ``rows``: those that it has per step if no other replica is running.

    With a lighthouse a micro-batch is not larger than it is when all replicas are running.
    """
    if run.reliability.torchft_lighthouse is None:
        return rows // micro_batches(rows, run.batch.micro_batch_sequences)
    return min(rows, run.batch.micro_batch_sequences or -(-rows // run.grid.data))


def micro_batches(rows: int, size: int | None) -> int:
    """The number of micro-batches of a rank's rows.

    Example:
        >>> micro_batches(8, 2), micro_batches(8, None)
        (4, 1)
    """
    if size is None or size >= rows:
        return 1
    if rows % size:
        fits = max(n for n in range(1, size + 1) if rows % n == 0)
        raise ValueError(
            f"batch.micro_batch_sequences={size} does not divide the {rows} sequences of a rank; use {fits}"
        )
    return rows // size
