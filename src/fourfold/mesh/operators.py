"""Collectives in the graph of a compiled block: the start of one, and its end.

A compiled block runs the code that others run, traced: `TracedCollectives` take the place of the grid's. Between start and end the
graph has what overlaps. The end takes what is sent as well, so that its memory is not used for something else meanwhile, and what is to
be computed meanwhile, because compilers change the order of what does not depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Kind, Pending, Purpose, by_number, copied

_library = torch.library.Library(
    "fourfold", "FRAGMENT"
)  # without the checks of `custom_op`, which take longer than the rest
_library.define(
    "start(Tensor sent, int collectives, str kind, str axis, str purpose, int[] shape, bool is_max) -> Tensor"
)
_library.define("finish(Tensor handle, Tensor sent, str kind, int[] shape, Tensor[] after) -> Tensor")


def _start(
    sent: Tensor,
    collectives: int,
    kind: Kind,
    axis: Axis,
    purpose: Purpose,
    shape: Sequence[int],
    is_max: bool,
) -> Tensor:
    """A tensor that stands for the collective, until `finish`."""
    grid = by_number[collectives]
    # Names of modules would make graphs of like blocks differ.
    if kind == "all_reduce":
        result = sent.clone(memory_format=torch.contiguous_format)
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        pending = grid.all_reduce(result, axis, purpose, op)
    else:
        result = sent.new_empty(shape)
        send = grid.all_gather if kind == "all_gather" else grid.reduce_scatter
        pending = send(result, sent.contiguous(), axis, purpose)
    handle: Any = torch.empty(1)
    handle.in_flight = result, pending
    return cast(Tensor, handle)


def _finish(
    handle: Tensor, sent: Tensor, kind: Kind, shape: Sequence[int], after: Sequence[Tensor]
) -> Tensor:
    result, pending = handle.__dict__.pop("in_flight")  # once: a graph that ends one twice is wrong
    pending.wait()
    return cast(Tensor, result)


def _fake_start(sent: Tensor, *_: Any) -> Tensor:
    return torch.empty(1)


def _fake_finish(
    handle: Tensor, sent: Tensor, kind: Kind, shape: Sequence[int], after: Sequence[Tensor]
) -> Tensor:
    return sent.new_empty(shape)


for _name, _run, _fake in (("start", _start, _fake_start), ("finish", _finish, _fake_finish)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fourfold::{_name}", _fake)


@dataclass(frozen=True)
class TracedCollectives:
    """The collectives of a grid, as a graph has them. Two half-batches do not alternate in a graph."""

    number: int
    interleaving: None = None

    def size(self, axis: Axis) -> int:
        return by_number[self.number].size(axis)

    def wait(self, pending: Pending, *, in_turns: bool) -> None:
        pending.wait()

    def all_reduce(
        self,
        tensor: Tensor,
        axis: Axis | None,
        purpose: Purpose,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        module: str = "",
    ) -> Pending:
        is_max = op == dist.ReduceOp.MAX
        assert is_max or op == dist.ReduceOp.SUM
        if axis is None or self.size(axis) == 1:
            return Pending()
        return self._started("all_reduce", tensor, tensor, axis, purpose, is_max)

    def all_gather(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        return self._started("all_gather", output, tensor, axis, purpose)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        return self._started("reduce_scatter", output, tensor, axis, purpose)

    def _started(
        self, kind: Kind, output: Tensor, sent: Tensor, axis: Axis, purpose: Purpose, is_max: bool = False
    ) -> Pending:
        if self.size(axis) == 1:
            return copied(output, sent)
        shape = list(output.shape)
        handle = torch.ops.fourfold.start(sent, self.number, kind, axis, purpose, shape, is_max)
        work = _InGraph(handle, sent, kind, output)
        return Pending(cast(dist.Work, work), wait=work.wait)


@dataclass
class _InGraph:
    """What a `Pending` in a graph waits for."""

    handle: Tensor
    sent: Tensor
    kind: Kind
    output: Tensor

    def wait(self, after: Sequence[Tensor]) -> None:
        shape = list(self.output.shape)
        self.output.copy_(torch.ops.fourfold.finish(self.handle, self.sent, self.kind, shape, after))


def traced(collectives: Collectives) -> Collectives:
    """``collectives`` for code that is traced into a graph."""
    return cast(Collectives, TracedCollectives(collectives.number))
