"""Collectives, and copies to the host and back, as late as CUDA may have them: each happens when it is waited for; until then its result is NaN.

On CPU a collective may be complete before anybody waits, which hides a wait that is missing or comes too late. Here it shows:
a result that is read too early is NaN, an input that is changed in flight is reported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold.mesh.offloading import Copy, HostMemory


@dataclass
class Seen:
    """What went wrong."""

    changed: list[str] = field(default_factory=list)
    started: int = 0
    waited: int = 0


class _Late:
    """A collective that happens in `wait`. ``restore`` puts an input that is also the output back before that."""

    def __init__(
        self,
        seen: Seen,
        name: str,
        run: Callable[[], Any],
        inputs: list[Tensor],
        output: Tensor,
        *,
        in_place: Tensor | None = None,
    ) -> None:
        self._seen, self._name, self._run, self._inputs = seen, name, run, inputs
        self._copies = [tensor.detach().clone() for tensor in inputs]
        self._in_place = None if in_place is None else (in_place, in_place.detach().clone())
        self._done = False
        self._future: torch.futures.Future[None] = torch.futures.Future()
        seen.started += 1
        output.data.fill_(torch.nan if output.is_floating_point() else -7)

    def wait(self, *_: Any) -> bool:
        if self._done:
            return True
        for tensor, copy in zip(self._inputs, self._copies, strict=True):
            if tensor.untyped_storage().nbytes() == 0 or not torch.equal(tensor.detach(), copy):
                self._seen.changed.append(self._name)
        if self._in_place is not None:
            tensor, copy = self._in_place
            tensor.data.copy_(copy)
        self._run()
        self._done = True
        self._future.set_result(None)
        self._seen.waited += 1
        return True

    def is_completed(self) -> bool:
        return self._done

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


@contextmanager
def late_collectives() -> Iterator[Seen]:
    """Every asynchronous collective that is started inside is late."""
    seen = Seen()
    names = ("all_reduce", "all_gather_single", "all_to_all_single")
    real = {name: getattr(dist, name) for name in names}

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not async_op:
            return real["all_reduce"](tensor, op, group)
        return _Late(
            seen,
            "all_reduce",
            lambda: real["all_reduce"](tensor.data, op, group),
            [],
            tensor,
            in_place=tensor,
        )

    def all_gather(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            return real["all_gather_single"](output, tensor, group)
        shares = tensor.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        return _Late(
            seen,
            "all_gather",
            lambda: real["all_gather_single"](output.data, tensor.data, group),
            [] if shares else [tensor],
            output,
            in_place=tensor if shares else None,
        )

    def all_to_all(
        output: Tensor, tensor: Tensor, *sizes: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        if not async_op:
            return real["all_to_all_single"](output, tensor, *sizes, group=group)
        return _Late(
            seen,
            "all_to_all",
            lambda: real["all_to_all_single"](output.data, tensor.data, *sizes, group=group),
            [tensor],
            output,
        )

    for name, replacement in zip(names, (all_reduce, all_gather, all_to_all), strict=True):
        setattr(dist, name, replacement)
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


class LateCopies:
    """Copies of one stream between a "device" and a "host" that are both the CPU (`fourfold.mesh.offloading.Copies`).

    They do not keep memory of the device alive: what is freed or changed before it is copied is reported.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen, self.from_host = seen, 0
        self._on_device: list[StorageWeakRef] = []
        self._memory = HostMemory(torch.empty_strided)
        self._queue: list[Callable[[], None]] = []

    def on_device(self) -> int:
        """How many tensors that were copied to the host, or back, have memory on the device."""
        return sum(not storage.expired() for storage in self._on_device)

    def to_host(self, tensor: Tensor, name: str) -> Copy:
        on_host, before = self._memory.take(tensor), tensor.clone()

        def run(device: Tensor) -> None:
            if not torch.equal(device, before):
                self.seen.changed.append(f"the input of {name}")
            on_host.copy_(device)

        return self._start(tensor, name, run, on_host)

    def to_device(self, on_host: Tensor, name: str) -> Copy:
        self.from_host += 1
        device = torch.full_like(on_host, torch.nan)
        return self._start(device, name, lambda device: device.copy_(on_host), device)

    def will_free(self, tensor: Tensor) -> None:
        with torch._C._DisableTorchDispatch():  # an input may be dropped while a graph is traced
            self._run_to(self.seen.started)

    def take_back(self, on_host: Tensor) -> None:
        self._memory.take_back(on_host)

    def _start(self, device: Tensor, name: str, run: Callable[[Tensor], Any], result: Tensor) -> Copy:
        storage = StorageWeakRef(device.untyped_storage())
        layout = device.storage_offset(), device.shape, device.stride()
        empty = device.new_empty(0)
        self._on_device.append(storage)

        def late() -> None:
            alive = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if alive is None:
                self.seen.changed.append(f"the freed input of {name}")
            else:
                run(empty.set_(alive, *layout))

        self._queue.append(late)
        self.seen.started += 1
        number = self.seen.started
        return Copy(result, lambda: self._run_to(number))

    def _run_to(self, number: int) -> None:
        while self.seen.waited < number:
            self.seen.waited += 1
            self._queue.pop(0)()
