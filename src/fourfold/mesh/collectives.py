"""Every collective there is: asynchronous, by axis name, counted and timed.

The package calls `torch.distributed` here and nowhere else, so that the account of calls and bytes is complete.
Sizes are those of a ring, which is what every large-message algorithm sends per rank:

    all-reduce      2 (G-1)/G x payload        payload: the tensor
    all-gather        (G-1)/G x payload        payload: the gathered result
    reduce-scatter    (G-1)/G x payload        payload: the tensor before it is scattered
    all-to-all        (G-1)/G x payload        payload: what a rank deals out, its own part among it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

# The work of the `fake` back end; no public name (torch 2.13.0).
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# The interfaces of `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` (seen in torch 2.13.0).
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fourfold.mesh.axes import Axis
from fourfold.mesh.clock import clock_of, moment

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
# What a collective is for. Activations and weights are the algorithm's traffic; the rest is small and listed apart.
Purpose = Literal[
    "activation",
    "regather",  # inputs of linears that come a second time, for backward
    "shared",  # gradients of key/value heads that several y ranks use
    "weight",
    "gradient",
    "norm",
    "loss",
    "clip",
    "replica",
    "logits",
    "check",
    "optimizer",
]
_Key = tuple[Axis, Kind, Purpose]
_UNREAD = 4096  # waits on CUDA whose times are kept unread at most


@dataclass(frozen=True)
class Entry:
    """One line of the account."""

    axis: Axis
    kind: Kind
    purpose: Purpose
    ranks: int
    calls: int = 0
    payload_bytes: int = 0
    # Seconds for which this rank's work stood still for it.
    exposed_s: float = field(default=0.0, compare=False)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent, as a ring sends them."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (self.ranks - 1) * self.payload_bytes / self.ranks

    def __add__(self, more: Entry) -> Entry:
        return replace(
            self,
            calls=self.calls + more.calls,
            payload_bytes=self.payload_bytes + more.payload_bytes,
            exposed_s=self.exposed_s + more.exposed_s,
        )


@dataclass
class InFlightCollective:
    """One collective, from its start to its end, and the waits for it; made for those alone who ask for it."""

    axis: Axis
    kind: Kind
    purpose: Purpose
    module: str
    payload_bytes: int
    issued_ns: int
    # When it was complete. On CUDA the host does not learn that: the profiler shows the kernel.
    done_ns: int | None = None
    waits_ns: list[tuple[int, int]] = field(default_factory=list)
    # None where the back end gives none, as to FSDP2 on CUDA.
    work: dist.Work | None = field(default=None, repr=False, compare=False)


class Observer(Protocol):
    """Who wants to know of each collective when it starts, and when it is waited for."""

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None: ...

    def waited(self, flight: InFlightCollective) -> None: ...

    def failed(self, flight: InFlightCollective, error: Exception) -> None:
        """The wait for it has failed: a peer is gone, or time is up."""


class Turns(Protocol):
    """Where the halves of a batch change over (`interleave.py`)."""

    def pass_on(self) -> None:
        """What was started is about to be waited for."""

    def begin_section(self) -> None:
        """In backward, what follows from here on ends with something in flight."""


class Alone:
    def pass_on(self) -> None: ...

    def begin_section(self) -> None: ...


class Pending:
    """A collective in flight. The tensors it works on are kept alive here until it was waited for."""

    def __init__(
        self,
        work: dist.Work | None = None,
        wait: Callable[[], None] | None = None,
        *tensors: Tensor,
    ) -> None:
        self._work, self._wait = work, wait
        self._tensors: tuple[Tensor, ...] | None = tensors

    def wait(self) -> None:
        """From here on the result can be used."""
        if self._wait is not None:
            self._wait()
        self._work = self._wait = self._tensors = None

    def is_done(self) -> bool:
        """Would waiting take no time?"""
        # Work that nobody does (the back end of a dry run) counts as under way until it is waited for.
        return self._work is None or (not isinstance(self._work, FakeWork) and self._work.is_completed())


_DONE = Pending()


class Collectives:
    """The collectives of one grid and their account."""

    def __init__(self, mesh: DeviceMesh, target: str) -> None:
        self._mesh = mesh
        self._sizes = dict(zip(cast(tuple[str, ...], mesh.mesh_dim_names), mesh.shape, strict=True))
        self._groups = {axis: mesh.get_group(axis) for axis, size in self._sizes.items() if size > 1}
        self._account: dict[_Key, Entry] = {}
        self._clock = clock_of(mesh.device_type)
        self._unread: list[tuple[_Key, Any, Any]] = []
        self._flights: list[InFlightCollective] | None = None
        self.observers: list[Observer] = []
        self._computed_besides_s: float | None = None
        # Who else may work while something is in flight: nobody, unless the halves of a batch take turns.
        self.turns: Turns = Alone()
        # Also where Gloo is only imitated: a dry run for CPUs.
        self._on_gloo = any(dist.get_backend(group) in ("gloo", "fake") for group in self._groups.values())
        self._on_gloo &= target == "cpu"

    def size(self, axis: Axis) -> int:
        return self._sizes[axis]

    # -- the account ----------------------------------------------------------------------------------------------

    def account(self) -> list[Entry]:
        """Calls, bytes and exposed seconds since the last reset, by axis, kind and purpose.

        On CUDA this waits until the device has done what was waited for.
        """
        self._read_times()
        return [self._account[key] for key in sorted(self._account)]

    def reset(self) -> None:
        self._account.clear()
        self._unread.clear()

    @contextmanager
    def counting(self) -> Iterator[list[Entry]]:
        """The account of what happens inside, alone.

        Example:
            >>> with grid.collectives.counting() as entries:
            ...     model(input_ids=ids, labels=ids).loss.backward()
            >>> sum(entry.bytes_sent for entry in entries)  # one rank sends nothing
            0
        """
        self._read_times()
        outer, self._account = self._account, {}
        entries: list[Entry] = []
        try:
            yield entries
        finally:
            entries.extend(self.account())
            inner, self._account = self._account, outer
            for entry in inner.values():
                self._add(entry)

    @contextmanager
    def computing(self) -> Iterator[list[float]]:
        """Seconds for which this thread computed inside, by the kernel's account of it; what it did in waits is left out."""
        seconds: list[float] = []
        self._computed_besides_s = 0.0
        _, busy_before_s = moment()
        try:
            yield seconds
        finally:
            _, busy_after_s = moment()
            seconds.append(busy_after_s - busy_before_s + self._computed_besides_s)
            self._computed_besides_s = None

    def _mark(self) -> tuple[Any, float]:
        """Now, and for how long this thread has been busy, if somebody wants to know that."""
        return moment() if self._clock.immediate and self.measures_computing else (self._clock.mark(), 0.0)

    @property
    def measures_computing(self) -> bool:
        """Does somebody want to know?"""
        return self._computed_besides_s is not None

    def add_computing(self, seconds: float) -> None:
        """So much was computed in another thread; what is below 0 was no computation of this one."""
        if self._computed_besides_s is not None:
            self._computed_besides_s += seconds

    @contextmanager
    def recording(self) -> Iterator[list[InFlightCollective]]:
        """Every collective that starts inside, one by one."""
        before, self._flights = self._flights, []
        try:
            yield self._flights
        finally:
            self._flights = before

    def _add(self, more: Entry) -> None:
        key = (more.axis, more.kind, more.purpose)
        had = self._account.get(key)
        self._account[key] = more if had is None else had + more

    def _read_times(self, oldest: int | None = None) -> None:
        for key, start, end in self._unread[:oldest]:
            self._add_exposed(key, self._clock.elapsed_s(start, end))
        del self._unread[:oldest]

    def _add_exposed(self, key: _Key, seconds: float) -> None:
        self._add(Entry(*key, self.size(key[0]), exposed_s=seconds))

    def _start(
        self, axis: Axis, kind: Kind, purpose: Purpose, payload: Tensor, module: str
    ) -> InFlightCollective | None:
        """Put a collective on the account; a flight, if somebody records."""
        payload_bytes = payload.numel() * payload.element_size()
        self._add(Entry(axis, kind, purpose, self.size(axis), 1, payload_bytes))
        if self._flights is None and not self.observers:
            return None
        flight = InFlightCollective(axis, kind, purpose, module, payload_bytes, time.time_ns())
        if self._flights is not None:
            self._flights.append(flight)
        return flight

    def _tell_started(
        self, flight: InFlightCollective | None, work: dist.Work | None, *tensors: Tensor
    ) -> None:
        if flight is not None and self.observers:
            flight.work = work
            for observer in self.observers:
                observer.started(flight, *tensors)

    def _pending(
        self,
        work: dist.Work,
        key: _Key,
        flight: InFlightCollective | None,
        *tensors: Tensor,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        """``work`` in flight, with a wait that is timed."""
        self._tell_started(flight, work, *tensors)
        if self._flights is not None and flight is not None and self._clock.immediate:

            def landed(_: Any) -> None:
                flight.done_ns = time.time_ns()

            work.get_future().add_done_callback(landed)

        def wait() -> None:
            start_ns = time.time_ns()
            start, busy_before_s = self._mark()
            try:
                # On CUDA this makes the current stream wait, not the host: c10d's contract for async work.
                work.wait()
            except RuntimeError as error:
                for observer in self.observers if flight is not None else ():
                    observer.failed(flight, error)  # type: ignore[arg-type]
                raise
            end, busy_after_s = self._mark()
            end_ns = time.time_ns()
            self.add_computing(busy_before_s - busy_after_s)
            if self._clock.immediate:
                exposed_s = self._clock.elapsed_s(start, end)
                self._add_exposed(key, exposed_s)
                # The trace shows what the account says: a thread may lose its core between two readings of a clock.
                end_ns = start_ns + round(exposed_s * 1e9)
            else:
                self._unread.append((key, start, end))
                if len(self._unread) > _UNREAD:
                    # The older half, which the device is past: for the newest the host would wait.
                    self._read_times(_UNREAD // 2)
            if flight is not None:
                flight.waits_ns.append((start_ns, end_ns))
                if (
                    self._clock.immediate
                ):  # it is done, and its tensors are not to live as long as the flight is kept
                    flight.work = None
                for observer in self.observers:
                    observer.waited(flight)
            if finish is not None:
                finish()

        return Pending(work, wait, *tensors)

    # -- the collectives: in place or into a given tensor, in flight until `wait` ----------------------------------
    #
    # ``module`` is whose work it is, for timelines and for the report of a hang.

    def all_reduce(
        self,
        tensor: Tensor,
        axis: Axis | None,
        purpose: Purpose,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        module: str = "",
    ) -> Pending:
        """Reduce ``tensor`` in place over an axis; nothing happens on no axis or one of a single rank."""
        if axis is None or self.size(axis) == 1:
            return _DONE
        flight = self._start(axis, "all_reduce", purpose, tensor, module)
        work = dist.all_reduce(tensor, op, self._groups[axis], async_op=True)
        return self._pending(cast(dist.Work, work), (axis, "all_reduce", purpose), flight, tensor)

    def all_gather(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        """The ranks' tensors side by side along their first dim."""
        if self.size(axis) == 1:
            output.view(-1).copy_(tensor.view(-1))
            return _DONE
        flight = self._start(axis, "all_gather", purpose, output, module)
        # Flat, because Gloo wants the output to be the inputs side by side along their first dim.
        work = dist.all_gather_single(output.view(-1), tensor.view(-1), self._groups[axis], async_op=True)
        return self._pending(work, (axis, "all_gather", purpose), flight, output, tensor)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        """This rank's part of the sum of the ranks' tensors, cut along their first dim."""
        if self.size(axis) == 1:
            output.view(-1).copy_(tensor.view(-1))
            return _DONE
        flight = self._start(axis, "reduce_scatter", purpose, tensor, module)
        key: _Key = (axis, "reduce_scatter", purpose)
        whole, group = tensor.view(-1), self._groups[axis]
        if not self._on_gloo:
            work = dist.reduce_scatter_single(output.view(-1), whole, dist.ReduceOp.SUM, group, async_op=True)
            return self._pending(work, key, flight, output, tensor)
        # Gloo's own reduce-scatter is an all-reduce of a copy and sends twice what is needed. Each rank can as well
        # get the parts that are its own and add them up, in the order of the ranks.
        parts = torch.empty_like(whole)
        work = cast(dist.Work, dist.all_to_all_single(parts, whole, group=group, async_op=True))

        def add_up() -> None:
            torch.sum(parts.view(self.size(axis), -1), dim=0, out=output.view(-1))

        return self._pending(work, key, flight, output, tensor, parts, finish=add_up)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        """Part i of ``tensor``, cut along its first dim, goes to rank i; ``output`` has what the ranks sent here."""
        if self.size(axis) == 1:
            output.view(-1).copy_(tensor.view(-1))
            return _DONE
        flight = self._start(axis, "all_to_all", purpose, tensor, module)
        group = self._groups[axis]
        work = dist.all_to_all_single(output.view(-1), tensor.view(-1), group=group, async_op=True)
        return self._pending(cast(dist.Work, work), (axis, "all_to_all", purpose), flight, output, tensor)

    # -- FSDP2's collectives, led through the same account ----------------------------------------------------------

    def take_over(self, module: FSDPModule) -> None:
        """Let the collectives of a `fully_shard`ed module be counted here.

        Gradients are summed, not averaged: the loss is divided by the tokens of the global batch already. The data
        axis is reduced in FSDP2's hook behind the reduce-scatter, which is its documented place for that. On CUDA the
        waits are FSDP2's own, between its streams: their seconds are not in the account.
        """
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_CountedAllGather(self))
        module.set_custom_reduce_scatter(_CountedReduceScatter(self))
        if self.size("data") > 1:
            module.set_all_reduce_hook(self._reduce_over_data)

    def _reduce_over_data(self, gradient: Tensor) -> None:
        if not gradient.is_cuda:
            self.all_reduce(gradient, "data", "gradient").wait()
            return
        # This hook runs in FSDP2's all-reduce stream: a wait there holds up no computation and is not timed.
        flight = self._start("data", "all_reduce", "gradient", gradient, "")
        dist.all_reduce(gradient, group=self._groups["data"])
        self._tell_started(flight, None, gradient)
        # Allocated in FSDP2's reduce-scatter stream, used in its all-reduce stream. FSDP2 keeps such a buffer from being
        # reused too early for its own all-reduce alone; here this does.
        gradient.record_stream(torch.cuda.current_stream())


class _Allocate:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_Allocate, AllGather):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        ours = self._collectives
        if not output_tensor.is_cuda and not async_op and ours.size("z") > 1:
            ours.all_gather(output_tensor, input_tensor, "z", "weight").wait()
            return None
        flight = ours._start("z", "all_gather", "weight", output_tensor, "")
        work = cast(
            dist.Work | None, dist.all_gather_single(output_tensor, input_tensor, group, async_op=async_op)
        )
        if output_tensor.is_cuda:
            ours._tell_started(flight, work, output_tensor, input_tensor)
        return work


class _CountedReduceScatter(_Allocate, ReduceScatter):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        ours = self._collectives
        if not output_tensor.is_cuda and not async_op and ours.size("z") > 1:
            assert op == dist.ReduceOp.SUM, op
            ours.reduce_scatter(output_tensor, input_tensor, "z", "gradient").wait()
            return None
        flight = ours._start("z", "reduce_scatter", "gradient", input_tensor, "")
        work = cast(
            dist.Work | None,
            dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=async_op),
        )
        if output_tensor.is_cuda:
            ours._tell_started(flight, work, output_tensor, input_tensor)
        return work
