"""Fault injection in a rank: a trainer callback and file calls that cause the requested faults at their points."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.checkpoint import folder as files
from fourfold.checkpoint.commit import step_of
from fourfold.drill.fault import FILE_POINTS, Fault, Point
from fourfold.mesh.collectives import InFlightCollective, Observer
from fourfold.train.loop.trainer import Callback, StepResult, Trainer

SPIKE = 1e4  # times the gradient
# A flip of the highest exponent bit of an fp32 value is the difference between about 1 and about 1e38; flips of these
# mantissa bits do not show in a loss.
SILENT_BITS = range(8, 23)


class RankFaults:
    """The faults of one rank, and how often the point of each was reached.

    ``record``, a folder, remembers across restarts which of them have happened: each happens once.
    """

    def __init__(self, faults: Sequence[Fault], rank: int, record: Path | None = None) -> None:
        self.faults = [fault for fault in faults if fault.rank == rank]
        self._record = record
        self.reached = dict.fromkeys(self.faults, 0)
        self.step = 1  # the current one

    def trigger(self, at: Point, name: str = "", step: int | None = None) -> list[Fault]:
        """Cause the faults that are due at this point, and return them."""
        due = []
        for fault in self.faults:
            if not fault.matches(at, self.step if step is None else step, name):
                continue
            self.reached[fault] += 1
            times = self.reached[fault] - fault.nth
            if (times == 0 and self._note(fault)) or (times > 0 and fault.action == "slow"):
                due.append(fault)
        for fault in due:
            _cause(fault)
        return due

    def trigger_now(self, fault: Fault) -> None:
        """Cause the fault wherever the rank is."""
        if self._note(fault):
            _cause(fault)

    def _note(self, fault: Fault) -> bool:
        """Record the fault before it happens; False if it has happened already."""
        if self._record is None:
            return True
        self._record.mkdir(parents=True, exist_ok=True)
        try:
            # Not through `FileCalls`, where faults are injected.
            os.close(os.open(self._record / f"{fault}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def _cause(fault: Fault) -> None:
    """Kill, stop or delay this process; other actions need a gradient, a weight or a file."""
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "slow":
        time.sleep(fault.seconds)


# -- in files ----------------------------------------------------------------------------------------------------------


class HookedFileCalls(files.FileCalls):
    """The system calls of a save; ``hook`` may interrupt each of them."""

    def __init__(self, hook: Callable[[Point, Path], None]) -> None:
        self._hook = hook

    def write(self, descriptor: int, view: memoryview, path: Path) -> int:
        half = super().write(descriptor, view[: len(view) // 2], path)
        self._hook("write", path)
        return half + super().write(descriptor, view[half:], path)

    def fsync(self, descriptor: int, path: Path) -> None:
        self._hook("fsync", path)
        super().fsync(descriptor, path)

    def rename(self, source: Path, target: Path) -> None:
        self._hook("rename", source)
        super().rename(source, target)
        self._hook("renamed", source)

    def remove(self, path: Path) -> None:
        self._hook("remove", path)
        super().remove(path)


@contextmanager
def hooked_files(hook: Callable[[Point, Path], None]) -> Iterator[None]:
    """Call ``hook`` in every system call of this process's saves."""
    before, files.calls = files.calls, HookedFileCalls(hook)
    try:
        yield
    finally:
        files.calls = before


@contextmanager
def faults_in_files(faults: RankFaults) -> Iterator[None]:
    """Inject the faults into the saves of this process."""

    def hook(at: Point, path: Path) -> None:
        # The step that is being saved, not the one that is computed meanwhile.
        steps = [step for part in path.parts if (step := step_of(part.removesuffix(".tmp"))) is not None]
        for fault in faults.trigger(at, path.name, steps[-1] if steps else None):
            if fault.action in ("eio", "enospc"):
                number = errno.EIO if fault.action == "eio" else errno.ENOSPC
                raise OSError(number, os.strerror(number), str(path))

    if not any(fault.at in FILE_POINTS for fault in faults.faults):
        yield
        return
    with hooked_files(hook):
        yield


# -- in a run ----------------------------------------------------------------------------------------------------------


class Injector(Callback, Observer):
    """Causes faults in a run. Put it first among the callbacks, so that the others see its effects."""

    def __init__(self, faults: Sequence[Fault], *, record: Path | None = None) -> None:
        self._wanted, self._record = faults, record
        self._faults = RankFaults([], 0)

    @contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        self._faults = faults = RankFaults(self._wanted, dist.get_rank(), self._record)
        points = {fault.at for fault in faults.faults}
        with ExitStack() as ends:
            ends.enter_context(faults_in_files(faults))
            if "collective" in points:
                trainer.grid.collectives.observers.append(self)
                ends.callback(trainer.grid.collectives.observers.remove, self)
            if "forward" in points:
                for name, module in trainer.model.named_modules():
                    ends.callback(module.register_forward_pre_hook(self._forward_hook(name)).remove)
            if "optimizer" in points:
                hook = trainer.optimizer.register_step_pre_hook(
                    lambda *_: self._flip_weights(trainer, "optimizer")
                )
                ends.callback(hook.remove)
            for fault in faults.faults:
                if fault.at == "instant":
                    timer = threading.Timer(fault.seconds, faults.trigger_now, [fault])
                    timer.daemon = True
                    timer.start()
                    ends.callback(timer.cancel)
            yield

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        self._faults.step = trainer.step + 1
        self._flip_weights(trainer, "step")
        yield

    def on_gradients(self, trainer: Trainer) -> None:
        for fault in self._faults.trigger("gradients"):
            choose = random.Random(fault.seed)
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            local = cast(DTensor, choose.choice(gradients)).to_local().view(-1)
            index = choose.randrange(local.numel())
            if fault.action == "nan":
                local[index] = float("nan")
            elif fault.action == "spike":
                torch._foreach_mul_([cast(DTensor, g).to_local() for g in gradients], SPIKE)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._faults.step = result.step  # saves belong to the step that they follow

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None:
        self._faults.trigger("collective", f"{flight.axis} {flight.kind} {flight.module or flight.purpose}")

    def _forward_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._faults.trigger("forward", name)

        return hook

    def _flip_weights(self, trainer: Trainer, at: Point) -> None:
        for fault in self._faults.trigger(at):
            if fault.action == "flip":
                flip_weight(list(trainer.model.parameters()), random.Random(fault.seed))


@torch.no_grad()
def flip_weight(parameters: Sequence[nn.Parameter], choose: random.Random) -> None:
    """Flip one bit of one weight of this rank, low enough that no loss shows it."""
    shards = [cast(DTensor, p).to_local().view(-1) for p in parameters]
    shard = choose.choice([shard for shard in shards if shard.numel() and shard.dtype == torch.float32])
    index = choose.randrange(shard.numel())
    shard[index : index + 1].view(torch.int32).bitwise_xor_(1 << choose.choice(SILENT_BITS))
