"""Faults in a run: a callback of the trainer that plants them where they were asked for."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.drill.fault import Fault
from fourfold.drill.inject import Planted, in_files
from fourfold.mesh.collectives import InFlightCollective
from fourfold.train.loop.trainer import Callback, StepResult, Trainer

SPIKE = 1e4  # times the gradient
# The highest bit of the exponent of a number in fp32 decides between about 1 and about 1e38; a mantissa's bit is what
# nobody sees in a loss.
SILENT_BITS = range(8, 23)


class Injector(Callback):
    """Put it first among the callbacks: what it disturbs, the others are to notice."""

    def __init__(self, faults: Sequence[Fault], *, spent: Path | None = None) -> None:
        self._faults, self._spent = faults, spent
        self._planted = Planted([], 0)

    @contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        self._planted = planted = Planted(self._faults, dist.get_rank(), self._spent)
        points = {fault.at for fault in planted.faults}
        with ExitStack() as ends:
            ends.enter_context(in_files(planted))
            if "collective" in points:
                trainer.grid.collectives.observers.append(self)
                ends.callback(trainer.grid.collectives.observers.remove, self)
            if "forward" in points:
                for name, module in trainer.model.named_modules():
                    ends.callback(module.register_forward_pre_hook(self._entering(name)).remove)
            if "optimizer" in points:
                hook = trainer.optimizer.register_step_pre_hook(lambda *_: self._in_optimizer(trainer))
                ends.callback(hook.remove)
            for fault in planted.faults:
                if fault.at == "instant":
                    timer = threading.Timer(fault.seconds, planted.happen_once, [fault])
                    timer.daemon = True
                    timer.start()
                    ends.callback(timer.cancel)
            yield

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        self._planted.step = trainer.step + 1
        self._change_weights(trainer, self._planted.meet("step"))
        yield

    def on_gradients(self, trainer: Trainer) -> None:
        for fault in self._planted.meet("gradients"):
            choose = random.Random(fault.seed)
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            local = cast(DTensor, choose.choice(gradients)).to_local().view(-1)
            number = choose.randrange(local.numel())
            if fault.action == "nan":
                local[number] = float("nan")
            elif fault.action == "spike":
                torch._foreach_mul_([cast(DTensor, g).to_local() for g in gradients], SPIKE)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._planted.step = result.step  # saves belong to the step that they follow

    # -- in a step ----------------------------------------------------------------------------------------------------

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None:
        self._planted.meet("collective", f"{flight.axis} {flight.kind} {flight.module or flight.purpose}")

    def waited(self, flight: InFlightCollective) -> None: ...

    def failed(self, flight: InFlightCollective, error: Exception) -> None: ...

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._planted.meet("forward", name)

        return hook

    def _in_optimizer(self, trainer: Trainer) -> None:
        self._change_weights(trainer, self._planted.meet("optimizer"))

    def _change_weights(self, trainer: Trainer, faults: list[Fault]) -> None:
        for fault in faults:
            if fault.action == "flip":
                flip_weight(list(trainer.model.parameters()), random.Random(fault.seed))


@torch.no_grad()
def flip_weight(parameters: Sequence[nn.Parameter], choose: random.Random) -> None:
    """One bit of one weight of this rank, low enough that no loss shows it."""
    shards = [cast(DTensor, p).to_local().view(-1) for p in parameters]
    shard = choose.choice([shard for shard in shards if shard.numel() and shard.dtype == torch.float32])
    number = choose.randrange(shard.numel())
    shard[number : number + 1].view(torch.int32).bitwise_xor_(1 << choose.choice(SILENT_BITS))
