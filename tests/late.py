"""Collectives as late as CUDA may have them: each happens when it is waited for, and its result is NaN until then.

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

    def all_to_all(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            return real["all_to_all_single"](output, tensor, group=group)
        return _Late(
            seen,
            "all_to_all",
            lambda: real["all_to_all_single"](output.data, tensor.data, group=group),
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
