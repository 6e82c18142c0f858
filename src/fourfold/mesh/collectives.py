"""Every collective of a step: asynchronous, by axis name, counted and timed for those who ask.

Collectives of a step are called here and in `weights/fsdp2.py` (FSDP2's own, which report themselves here), so that what
`counting` counts is complete. Sizes are those of a ring, which is what every large-message algorithm sends per rank:

    all-reduce      2 (G-1)/G x payload        payload: the tensor
    all-gather        (G-1)/G x payload        payload: the gathered result
    reduce-scatter    (G-1)/G x payload        payload: the tensor before it is scattered
    all-to-all        (G-1)/G x payload        payload: the tensor that a rank sends, its own part included;
                                               with sizes it sends all of it but its own part

Nobody observes a step unless asked to: then a collective costs its call and its wait, without a record, a clock read or a
CUDA event.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# The work of the `fake` back end; no public name (torch 2.13.0).
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh

from fourfold.mesh.axes import Axis
from fourfold.mesh.clock import clock_of

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
# What a collective is for. Activations and weights are the algorithm's traffic; the rest is small and listed apart.
Purpose = Literal[
    "activation",
    "regather",  # inputs of linears, gathered a second time for backward
    "routing",  # of tokens to experts: choices, their weights and the gradients of these
    "balance",  # of experts: how many tokens chose each, and how probable it was
    "counts",  # of the rows that ranks have for each other's experts
    "dispatch",  # rows to the ranks that own their experts, and the gradients of these rows
    "combine",  # what experts made of rows, back to the ranks that these are from, and its gradients
    "shared",  # gradients of key/value heads that several y ranks use
    "keys-values",  # of the ranks that share a sequence, and their gradients
    "positions",  # of the tokens of these ranks
    "weight",
    "gradient",
    "norm",
    "scale",  # of float8: the largest magnitudes of rows
    "loss",
    "clip",
    "replica",
    "logits",
    "check",
    "optimizer",
    "export",
]
_Key = tuple[Axis, Kind, Purpose]
_MAX_UNREAD = 4096  # waits on CUDA whose events are kept unread


@dataclass(frozen=True)
class Entry:
    """Calls, bytes and exposed seconds of one axis, kind and purpose."""

    axis: Axis
    kind: Kind
    purpose: Purpose
    ranks: int
    calls: int = 0
    payload_bytes: int = 0
    # Of all-to-alls with sizes: the part of the payload that stayed on this rank.
    kept_bytes: int | None = None
    # Seconds that this rank's work waited for it.
    exposed_s: float = field(default=0.0, compare=False)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent, as a ring sends them."""
        if self.kept_bytes is not None:
            return self.payload_bytes - self.kept_bytes
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (self.ranks - 1) * self.payload_bytes / self.ranks

    def __add__(self, more: Entry) -> Entry:
        # A purpose is that of collectives with sizes, or of others.
        has_sizes = self.kept_bytes is not None or more.kept_bytes is not None
        return replace(
            self,
            calls=self.calls + more.calls,
            payload_bytes=self.payload_bytes + more.payload_bytes,
            kept_bytes=(self.kept_bytes or 0) + (more.kept_bytes or 0) if has_sizes else None,
            exposed_s=self.exposed_s + more.exposed_s,
        )


@dataclass
class InFlightCollective:
    """One collective, from its start to its end, and the waits for it; made only if somebody observes."""

    axis: Axis
    kind: Kind
    purpose: Purpose
    module: str
    payload_bytes: int
    issued_ns: int
    # Of an all-to-all with sizes: the part of the payload that stays on this rank.
    kept_bytes: int | None = None
    # When it was complete. On CUDA the host does not learn that: the profiler shows the kernel.
    done_ns: int | None = None
    waits_ns: list[tuple[int, int]] = field(default_factory=list)
    # None where the back end gives none, as to FSDP2 on CUDA.
    work: dist.Work | None = field(default=None, repr=False, compare=False)


class Observer:
    """Is told of each collective when it starts, and when it has been waited for."""

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None: ...

    def waited(self, flight: InFlightCollective) -> None: ...

    def failed(self, flight: InFlightCollective, error: Exception) -> None:
        """The wait for it has failed: a peer is gone, or the time-out has passed."""


class Interleaving(Protocol):
    """Where two half-batches alternate (`parallel/batch_split.py`)."""

    def switch(self) -> None:
        """A collective was started and is about to be waited for: run the other half meanwhile."""

    def begin_section(self) -> None:
        """In backward, the nodes made from here on end with a collective in flight."""


class Pending:
    """A collective in flight. It keeps its tensors alive until it has been waited for."""

    __slots__ = ("_finish", "_tensors", "_wait", "_work")

    def __init__(
        self,
        work: dist.Work | None = None,
        tensors: tuple[Tensor, ...] = (),
        finish: Callable[[], None] | None = None,
        wait: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self._work, self._finish, self._wait = work, finish, wait
        self._tensors: tuple[Tensor, ...] | None = tensors

    def wait(self, after: Sequence[Tensor] = ()) -> None:
        """From here on the result can be used. ``after`` is what was computed meanwhile: a graph keeps that order."""
        if self._work is not None:
            # On CUDA this makes the current stream wait, not the host: c10d's contract for asynchronous work.
            if self._wait is not None:
                self._wait(after)
            else:
                self._work.wait()
            if self._finish is not None:
                self._finish()
        self._work = self._finish = self._wait = self._tensors = None

    def is_done(self) -> bool:
        """Would waiting take no time?"""
        # Work that nobody does (the back end of a dry run) counts as in flight until it is waited for.
        return self._work is None or (not isinstance(self._work, FakeWork) and self._work.is_completed())


_DONE = Pending()


by_number: WeakValueDictionary[int, Collectives] = WeakValueDictionary()
_numbers = itertools.count()


class Collectives:
    """The collectives of one grid."""

    def __init__(
        self, mesh: DeviceMesh, target: str, shares_sequences: dist.ProcessGroup | None = None
    ) -> None:
        # The operators of a compiled block take tensors and numbers (`operators.py`).
        self.number = next(_numbers)
        by_number[self.number] = self
        self._sizes = dict(zip(cast(tuple[str, ...], mesh.mesh_dim_names), mesh.shape, strict=True))
        self._groups = {axis: mesh.get_group(axis) for axis, size in self._sizes.items() if size > 1}
        self._sizes["sequence"] = 1 if shares_sequences is None else shares_sequences.size()
        if shares_sequences is not None:
            self._groups["sequence"] = shares_sequences
        self.timeout_s: float | None = None  # of the groups, if it was set
        self.clock = clock_of(mesh.device_type)
        self.observers: list[Observer] = []
        # How many of them want to know for how long a rank waited.
        self._timing = 0
        # Set while two half-batches alternate in the model.
        self.interleaving: Interleaving | None = None
        # Also where Gloo is only imitated: a dry run for CPUs.
        self._on_gloo = any(dist.get_backend(group) in ("gloo", "fake") for group in self._groups.values())
        self._on_gloo &= target == "cpu"

    def size(self, axis: Axis) -> int:
        return self._sizes[axis]

    def has(self, axis: Axis) -> bool:
        """Is there a group of several ranks?"""
        return axis in self._groups

    def join(self, axis: Axis, group: dist.ProcessGroup) -> None:
        """Add an axis that is made of others."""
        self._sizes[axis], self._groups[axis] = group.size(), group

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The process group of an axis of several ranks."""
        return self._groups[axis]

    # -- observing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def counting(self) -> Iterator[list[Entry]]:
        """Calls, bytes and exposed seconds of what happens inside, by axis, kind and purpose.

        The list is filled at the end; on CUDA that waits until the device has done what was waited for.

        Example:
            >>> with grid.collectives.counting() as entries:
            ...     model(input_ids=ids, labels=ids).loss.backward()
            >>> sum(entry.bytes_sent for entry in entries)  # one rank sends nothing
            0
        """
        counter = _Counter(self)
        entries: list[Entry] = []
        with self._observed_by(counter):
            try:
                yield entries
            finally:
                entries.extend(counter.entries())

    @contextmanager
    def recording(self) -> Iterator[list[InFlightCollective]]:
        """Every collective that starts inside, one by one."""
        recorder = _Recorder(self.clock.immediate)
        with self._observed_by(recorder):
            yield recorder.flights

    @contextmanager
    def _observed_by(self, observer: _Counter | _Recorder) -> Iterator[None]:
        self.observers.append(observer)
        self._timing += 1
        try:
            yield
        finally:
            self.observers.remove(observer)
            self._timing -= 1

    def report(
        self,
        axis: Axis,
        kind: Kind,
        purpose: Purpose,
        payload: Tensor,
        work: dist.Work | None,
        *tensors: Tensor,
        module: str = "",
        issued_ns: int | None = None,
        kept_bytes: int | None = None,
    ) -> InFlightCollective | None:
        """Tell the observers, if there are any, of a collective that was started."""
        if not self.observers:
            return None
        payload_bytes = payload.numel() * payload.element_size()
        issued_ns = time.time_ns() if issued_ns is None else issued_ns
        flight = InFlightCollective(
            axis, kind, purpose, module, payload_bytes, issued_ns, kept_bytes, work=work
        )
        for observer in self.observers:
            observer.started(flight, *tensors)
        return flight

    def _wait_observed(self, work: dist.Work, flight: InFlightCollective) -> None:
        timed = self._timing > 0
        start_ns = time.time_ns() if timed else 0
        start = self.clock.mark() if timed else None
        try:
            work.wait()
        except RuntimeError as error:
            for observer in self.observers:
                observer.failed(flight, error)
            raise
        if timed:
            end, end_ns = self.clock.mark(), time.time_ns()
            if self.clock.immediate:
                # The trace shows what `counting` counts: a thread may lose its core between two readings of a clock.
                end_ns = start_ns + round(self.clock.elapsed_s(start, end) * 1e9)
            flight.waits_ns.append((start_ns, end_ns))
            for observer in self.observers:
                if isinstance(observer, _Counter):
                    observer.add_wait(flight, start, end)
        if self.clock.immediate:
            flight.work = None  # its tensors need not live as long as the record does
        for observer in self.observers:
            observer.waited(flight)

    # -- the collectives: in place or into a given tensor, in flight until `wait` ----------------------------------
    #
    # ``module`` names whose work it is, for timelines and for the report of a hang.

    def _start(
        self,
        what: tuple[Axis, Kind, Purpose, str],
        payload: Tensor,
        call: Callable[[dist.ProcessGroup], Any],
        tensors: tuple[Tensor, ...],
        finish: Callable[[], None] | None = None,
        kept_bytes: int | None = None,
    ) -> Pending:
        axis, kind, purpose, module = what
        issued_ns = time.time_ns() if self.observers else None
        work = cast(dist.Work, call(self._groups[axis]))
        if issued_ns is None:
            return Pending(work, tensors, finish)
        flight = self.report(
            axis,
            kind,
            purpose,
            payload,
            work,
            *tensors,
            module=module,
            issued_ns=issued_ns,
            kept_bytes=kept_bytes,
        )
        assert flight is not None
        return Pending(work, tensors, finish, lambda _: self._wait_observed(work, flight))

    def wait(self, pending: Pending, *, in_turns: bool) -> None:
        """Wait for a collective; ``in_turns``: where two half-batches alternate, the other one computes first."""
        if in_turns and self.interleaving is not None:
            self.interleaving.switch()
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
        """Reduce ``tensor`` in place over an axis; nothing happens on no axis or one of a single rank."""
        if axis is None or self._sizes[axis] == 1:
            return _DONE

        def call(group: dist.ProcessGroup) -> Any:
            return dist.all_reduce(tensor, op, group, async_op=True)

        return self._start((axis, "all_reduce", purpose, module), tensor, call, (tensor,))

    def all_gather(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        """The ranks' tensors side by side along their first dim."""
        if self._sizes[axis] == 1:
            return copied(output, tensor)

        def call(group: dist.ProcessGroup) -> Any:
            # Flat, because Gloo wants the output to be the inputs side by side along their first dim.
            return dist.all_gather_single(output.view(-1), tensor.view(-1), group, async_op=True)

        return self._start((axis, "all_gather", purpose, module), output, call, (output, tensor))

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        """This rank's part of the sum of the ranks' tensors, split along their first dim."""
        if self._sizes[axis] == 1:
            return copied(output, tensor)
        what: tuple[Axis, Kind, Purpose, str] = (axis, "reduce_scatter", purpose, module)
        flat = tensor.view(-1)
        if not self._on_gloo:

            def scatter(group: dist.ProcessGroup) -> Any:
                return dist.reduce_scatter_single(
                    output.view(-1), flat, dist.ReduceOp.SUM, group, async_op=True
                )

            return self._start(what, tensor, scatter, (output, tensor))
        # Gloo's own reduce-scatter is an all-reduce of a copy and sends twice what is needed. Each rank can as well
        # get the parts that are its own and add them up, in the order of the ranks.
        parts = torch.empty_like(flat)

        def exchange(group: dist.ProcessGroup) -> Any:
            return dist.all_to_all_single(parts, flat, group=group, async_op=True)

        def add_up() -> None:
            torch.sum(parts.view(self._sizes[axis], -1), dim=0, out=output.view(-1))

        return self._start(what, tensor, exchange, (output, tensor, parts), add_up)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, axis: Axis, purpose: Purpose, *, module: str = ""
    ) -> Pending:
        """Part i of ``tensor``, split along its first dim, goes to rank i; ``output`` has what the ranks sent here."""
        if self._sizes[axis] == 1:
            return copied(output, tensor)

        def call(group: dist.ProcessGroup) -> Any:
            return dist.all_to_all_single(output.view(-1), tensor.view(-1), group=group, async_op=True)

        return self._start((axis, "all_to_all", purpose, module), tensor, call, (output, tensor))

    def all_to_all_rows(
        self,
        output: Tensor,
        tensor: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        axis: Axis,
        purpose: Purpose,
        *,
        module: str = "",
    ) -> Pending:
        """As `all_to_all`, with ``sent[i]`` rows for rank i and ``received[i]`` rows from it; rank i has to know the same numbers."""
        if self._sizes[axis] == 1:
            return copied(output, tensor)

        def call(group: dist.ProcessGroup) -> Any:
            return dist.all_to_all_single(
                output, tensor, list(received), list(sent), group=group, async_op=True
            )

        row_bytes = tensor[:1].numel() * tensor.element_size() if len(tensor) else 0
        kept_bytes = sent[self._groups[axis].rank()] * row_bytes
        what: tuple[Axis, Kind, Purpose, str] = (axis, "all_to_all", purpose, module)
        return self._start(what, tensor, call, (output, tensor), kept_bytes=kept_bytes)


def copied(output: Tensor, tensor: Tensor) -> Pending:
    """A gather or a scatter on an axis of one rank."""
    output.view(-1).copy_(tensor.view(-1))
    return _DONE


class _Counter(Observer):
    """Sums calls, bytes and exposed seconds."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._clock = collectives, collectives.clock
        self._entries: dict[_Key, Entry] = {}
        self._unread: list[tuple[InFlightCollective, Any, Any]] = []

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None:
        self._add(flight, calls=1, payload_bytes=flight.payload_bytes, kept_bytes=flight.kept_bytes)

    def add_wait(self, flight: InFlightCollective, start: Any, end: Any) -> None:
        self._unread.append((flight, start, end))
        if self._clock.immediate:
            self._read()
        elif len(self._unread) > _MAX_UNREAD:
            # The older half, which the device is past: for the newest the host would wait.
            self._read(_MAX_UNREAD // 2)

    def entries(self) -> list[Entry]:
        self._read()
        return [self._entries[key] for key in sorted(self._entries)]

    def _read(self, oldest: int | None = None) -> None:
        for flight, start, end in self._unread[:oldest]:
            self._add(flight, exposed_s=self._clock.elapsed_s(start, end))
        del self._unread[:oldest]

    def _add(self, flight: InFlightCollective, **amounts: Any) -> None:
        key: _Key = (flight.axis, flight.kind, flight.purpose)
        more = Entry(*key, self._collectives.size(flight.axis), **amounts)
        had = self._entries.get(key)
        self._entries[key] = more if had is None else had + more


class _Recorder(Observer):
    """Keeps every collective, with the moment of its end where the host learns it."""

    def __init__(self, sees_end: bool) -> None:
        self.flights: list[InFlightCollective] = []
        self._sees_end = sees_end

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None:
        self.flights.append(flight)
        if self._sees_end and flight.work is not None:

            def landed(_: Any) -> None:
                flight.done_ns = time.time_ns()

            flight.work.get_future().add_done_callback(landed)
