"""The loop: batches in, steps out, and everything else in callbacks.

    for each step   the rate of the schedule; this rank's rows in micro-batches, gradients sent with the last;
                    clipping; the optimizer; callbacks; a checkpoint

What a step does depends on (seed, step) and the data alone, so a run that is resumed, also on another grid, goes on as
it would have.
"""

from __future__ import annotations

import math
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
from fourfold.data.mixture import check_identity, open_mixture
from fourfold.mesh.clock import Clock, clock_of
from fourfold.mesh.grid import Grid
from fourfold.optim.clip import clip_grad_norm_
from fourfold.parallel.dropout import seed_ranks
from fourfold.parallel.loss import count_labels
from fourfold.train.loop.model import build_model
from fourfold.train.loop.optimizers import build_optimizer
from fourfold.train.loop.packing import check_documents_stay_apart
from fourfold.train.loop.schedule import rate_of_step
from fourfold.train.loop.update import update
from fourfold.train.recovery.rollback import Rollbacks
from fourfold.train.recovery.stop import StopRequest
from fourfold.train.recovery.torchft_manager import TorchFTManager
from fourfold.weights.api import no_sync


@dataclass
class StepResult:
    """What a step leaves to callbacks. Nothing is read before somebody asks: on CUDA that waits for the device."""

    step: int  # steps done, this one among them
    loss: Tensor
    gradient_norm: Tensor | None
    learning_rate: float
    tokens: int
    clock: Clock
    start: Any  # marks of that clock, around the step
    end: Any
    figures: dict[str, float] = field(default_factory=dict)  # what callbacks add for those after them

    @property
    def seconds(self) -> float:
        return self.clock.elapsed_s(self.start, self.end)


class Callback:
    """Something beside the steps; each method may stay as it is."""

    def on_start(self, trainer: Trainer) -> None: ...

    def around_run(self, trainer: Trainer) -> AbstractContextManager[Any]:
        """From before the first `on_start` to after the last `on_end`, also when something fails between them."""
        return nullcontext()

    def around_step(self, trainer: Trainer) -> AbstractContextManager[Any]:
        return nullcontext()

    def on_gradients(self, trainer: Trainer) -> None:
        """Backward is over; nothing is clipped yet."""

    def refuses(self, trainer: Trainer, loss: Tensor, norm: Tensor | None) -> Tensor | None:
        """A flag, the same on all ranks: is this step to leave the weights as they are? None: no opinion."""
        return None

    def on_step(self, trainer: Trainer, result: StepResult) -> None: ...

    def on_save(self, trainer: Trainer) -> None:
        """A checkpoint is about to be saved: what of this callback decides how the run goes on, into `Training.beside`.

        Who asks to go back instead (`Trainer.back`), asks on all ranks; nothing is saved then.
        """

    def on_rollback(self, trainer: Trainer) -> None:
        """The run has been set to another step: back to a checkpoint, or to that of a replica which it copies."""

    def on_end(self, trainer: Trainer) -> None: ...


class Trainer:
    """A run on its grid. All ranks make it, and call it alike."""

    def __init__(self, run: RunConfig, grid: Grid, callbacks: Sequence[Callback] = ()) -> None:
        self.run, self.grid, self.callbacks = run, grid, list(callbacks)
        self.is_first = dist.get_rank() == 0
        self.quorum = TorchFTManager(self) if run.reliability.lighthouse is not None else None
        rows = grid.local_rows(run.sequences)  # refuses a batch that does not divide
        self.rows_at_a_time = rows_at_a_time(run, rows.stop - rows.start)
        self.replicas = 1 if self.quorum is None else run.grid.data  # jobs like this one, when all are there
        self.micro_batches = -(-(rows.stop - rows.start) // (self.replicas * self.rows_at_a_time))
        sources = [(source.path, source.weight) for source in run.data.sources]
        self.mixture = open_mixture(sources, length=run.data.sequence_length, seed=run.seed)
        self.loader = Loader(self.mixture, grid, run.sequences, read_ahead=run.data.read_ahead)
        self.model, self.report = build_model(run.model, run.engine, grid, run.seed, run.data.sequence_length)
        check_documents_stay_apart(
            self.model,
            grid,
            rows=self.rows_at_a_time,
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
        self.beside_s: defaultdict[str, float] = defaultdict(float)  # on this host, by what it was spent on
        self.place = "the start"  # in words, for the report of a hang
        self.back = Rollbacks()
        self._clock = clock_of(grid.device.type)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.training.step

    @property
    def is_done(self) -> bool:
        return self.step >= self.run.schedule.steps

    def train(self, checkpoints: Checkpoints | None = None, stop: StopRequest | None = None) -> None:
        """To the end of the schedule, or until it is asked to stop; from the newest checkpoint if there is one."""
        with ExitStack() as around:
            for callback in self.callbacks:
                around.enter_context(callback.around_run(self))
            self._train(checkpoints, stop)

    def _train(self, checkpoints: Checkpoints | None, stop: StopRequest | None) -> None:
        if checkpoints is not None:
            self._resume(checkpoints)
        for callback in self.callbacks:
            callback.on_start(self)
        if self.quorum is not None:
            batches = self.quorum.batches()
        else:
            batches = self.loader.batches(int(self.training.data["samples"]))
        stops = False
        while not self.is_done and not stops:
            result = self._step(batches)
            if result is None:
                continue
            if checkpoints is not None:
                self._wait_for_late(checkpoints)
            self.place = "callbacks"
            for callback in self.callbacks:
                callback.on_step(self, result)
            stops = stop is not None and stop.agreed()
            if checkpoints is not None and not self.back.is_asked and (stops or self.is_saved_at(self.step)):
                self._save(checkpoints)
            if self.back.is_asked:
                batches = self._go_back(checkpoints)
        if self.quorum is not None:
            self.quorum.close()
        if checkpoints is not None:
            with self.beside("checkpoint"):
                checkpoints.wait()
        for callback in self.callbacks:
            callback.on_end(self)

    def _save(self, checkpoints: Checkpoints) -> None:
        with self.beside("checkpoint"):
            # One replica saves for all; it may do steps again that another, which is gone by now, has saved.
            if self.quorum is not None and not (self.quorum.leads and self.step not in checkpoints.steps()):
                return
            for callback in self.callbacks:
                callback.on_save(self)
            if not self.back.is_asked:
                checkpoints.save(self.training)

    def _wait_for_late(self, checkpoints: Checkpoints) -> None:
        """Steps that are done while a checkpoint is written are lost if it is not finished: these may be too many."""
        within = self.run.checkpoints.written_within_steps
        if within is not None and checkpoints.saving is not None and self.step - checkpoints.saving >= within:
            with self.beside("checkpoint"):
                checkpoints.wait()

    def _go_back(self, checkpoints: Checkpoints | None) -> Iterator[Batch]:
        if self.quorum is not None:
            raise RuntimeError(
                f"step {self.step}: {self.back.why}; with reliability.lighthouse a run does not go back by itself: started "
                "again, it goes on from its newest checkpoint"
            )
        with self.beside("rollback"):
            self.back.go(self.training, checkpoints)
        for callback in self.callbacks:
            callback.on_rollback(self)
        return self.loader.batches(int(self.training.data["samples"]))

    def is_saved_at(self, step: int) -> bool:
        """Is there a checkpoint due behind this step? Every so many steps, and at the end."""
        every = self.run.checkpoints.every_steps
        return step >= self.run.schedule.steps or (every is not None and step % every == 0)

    @contextmanager
    def beside(self, what: str) -> Iterator[None]:
        """Time that this host spends on something else than steps."""
        self.place = what
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.beside_s[what] += time.perf_counter() - start_s

    def _resume(self, checkpoints: Checkpoints) -> None:
        if not self.run.checkpoints.resume:
            if there := checkpoints.steps():
                raise ValueError(
                    f"checkpoints.resume=false begins at step 0, but {checkpoints.root} has step-{there[-1]} of another run, and "
                    "the two would mix; use another checkpoints.folder, move it away, or resume"
                )
            return
        identity = dict(self.mixture.identity)
        # As with the rate, the run's file says how the optimizer works; the checkpoint says how far it is.
        groups = self.optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        if checkpoints.load(self.training) is not None:
            for group, own in zip(groups, options, strict=True):
                group.update(own)
            saved = {key: value for key, value in self.training.data.items() if key != "samples"}
            check_identity(saved, identity)

    def _step(self, batches: Iterator[Batch]) -> StepResult | None:
        """One step; None if a replica was lost on the way: nothing has changed."""
        start = self._clock.mark()
        if self.quorum is not None:
            with self.beside("quorum"):
                self.quorum.meet()
        with self.beside("data"):
            batch = next(batches)
        rate = self.run.optimizer.lr * rate_of_step(self.run.schedule, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        seed_ranks(self.grid, self.run.seed, self.step, replica=self.quorum.place if self.quorum else 0)
        with ExitStack() as around:
            for callback in self.callbacks:
                around.enter_context(callback.around_step(self))
            self.place = "forward and backward"
            loss = self._forward_and_backward(batch)
            if self.quorum is not None and not self.quorum.add_up(loss):
                self.optimizer.zero_grad()
                return None
            for callback in self.callbacks:
                callback.on_gradients(self)
            self.place = "clipping"
            norm, max_norm = None, self.run.optimizer.max_norm
            if max_norm is not None or self.run.reliability.skip_bad_steps:
                norm = clip_grad_norm_(self.model.parameters(), max_norm or math.inf, self.grid)
            self.place = "the optimizer"
            flags = [callback.refuses(self, loss, norm) for callback in self.callbacks]
            update(self.optimizer, [flag for flag in flags if flag is not None])
            self.optimizer.zero_grad()
        self.training.step += 1
        self.training.data["samples"] = batch.next_sample
        end = self._clock.mark()
        result = StepResult(self.step, loss, norm, rate, self.run.batch.tokens, self._clock, start, end)
        if self.quorum is not None:
            result.figures["replicas"] = float(self.quorum.size)
        return result

    def _forward_and_backward(self, batch: Batch) -> Tensor:
        """The mean loss over the global batch; gradients of all micro-batches are sent with the last."""
        inputs = {name: rows.to(self.grid.device, non_blocking=True) for name, rows in batch.inputs.items()}
        counted = count_labels(inputs["labels"], self.grid, shift=True, at_least=0)
        if self.quorum is not None:
            counted = self.quorum.sum(counted)
        counted = counted.clamp(min=1)
        chunks = zip(*(rows.split(self.rows_at_a_time) for rows in inputs.values()), strict=True)
        parts = [dict(zip(inputs, rows, strict=True)) for rows in chunks]
        total = torch.zeros((), device=self.grid.device)
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1
            with nullcontext() if is_last else no_sync(self.model):
                loss = self.model(**part, num_items_in_batch=counted).loss
                loss.backward()
            total += loss.detach()
        return total


def rows_at_a_time(run: RunConfig, rows: int) -> int:
    """Of a rank that has so many, or all if it is the only replica left: no more than it takes when all are there."""
    if run.reliability.lighthouse is None:
        return rows // micro_batches(rows, run.batch.micro_batch_sequences)
    return min(rows, run.batch.micro_batch_sequences or -(-rows // run.grid.data))


def micro_batches(rows: int, at_a_time: int | None) -> int:
    """How many a rank's rows are taken in.

    Example:
        >>> micro_batches(8, 2), micro_batches(8, None)
        (4, 1)
    """
    if at_a_time is None or at_a_time >= rows:
        return 1
    if rows % at_a_time:
        fits = max(n for n in range(1, at_a_time + 1) if rows % n == 0)
        raise ValueError(
            f"batch.micro_batch_sequences={at_a_time} does not divide the {rows} sequences of a rank; use {fits}"
        )
    return rows // at_a_time
