"""Races between streams, found by PyTorch's CUDA sanitizer on fake tensors: a collective that nobody waits for, a buffer that is
freed or written while another stream uses it, and anything that makes the host wait.

NCCL's part is its documented contract: a collective runs on a stream of its group, which first waits for the current one;
`Work.wait` makes the current stream wait for it; until then the work holds its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._sanitizer import ArgumentHandler, CUDASanitizerDispatchMode
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold.dry_run.recorder import replaced


@dataclass
class _Storage:
    key: int
    alive: StorageWeakRef
    stream: int  # that it was allocated on
    used_on: dict[int, tuple[int, str]] = field(
        default_factory=dict
    )  # by stream, the last kernel's number and name
    recorded: set[int] = field(default_factory=set)  # streams of `record_stream`


class _Arguments(ArgumentHandler):
    def __init__(self, key_of: Callable[[Tensor], int]) -> None:
        super().__init__()
        self._key_of = key_of

    def _handle_argument(
        self,
        value: Any,
        is_write: bool,
        metadata_only: bool,
        name: str | None = None,
        is_output: bool = False,
    ) -> None:
        """As in PyTorch's, with the storage instead of the pointer, which a fake tensor does not have."""
        if isinstance(value, Tensor) and value.is_cuda:
            key = self._key_of(value)
            if is_write:
                self.dataptrs_written.add(key)
            elif not metadata_only:
                self.dataptrs_read.add(key)
            self.tensor_aliases.setdefault(key, []).append(name or "output")


class Sanitizer(CUDASanitizerDispatchMode):
    """``found`` are the faults, as sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.kernels = 0
        self._storages: dict[int, _Storage] = {}
        self._by_key: dict[int, _Storage] = {}
        self._shared: dict[int, _Storage] = {}  # used on another stream than their own
        self._pinned: dict[int, Tensor] = {}  # on the host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            to = torch.device(kwargs.get("device") or args[0].device)
            if args[0].is_cuda and to.type == "cpu" and not kwargs.get("non_blocking"):
                self.found.append("the host waits for a copy")
        if func is torch.ops.aten.copy_.default and args[0].is_cuda != args[1].is_cuda:
            on_host = args[1] if args[0].is_cuda else args[0]
            is_asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if not is_asynchronous or on_host.untyped_storage()._cdata not in self._pinned:
                self.found.append("the host waits for a copy")
        if func.namespace == "prim":  # metadata
            return func(*args, **kwargs)
        arguments = _Arguments(self._key)
        is_factory = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        arguments.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        outputs = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pinned[outputs.untyped_storage()._cdata] = outputs
        arguments.parse_outputs(func._schema, outputs, is_factory=is_factory)
        self._launch(
            torch.accelerator.current_stream().stream_id,
            arguments.dataptrs_read - arguments.dataptrs_written,
            arguments.dataptrs_written,
            func._schema.name,
            arguments.tensor_aliases,
        )
        return outputs

    def _launch(
        self, stream: int, read: set[int], written: set[int], name: str, aliases: dict[int, list[str]]
    ) -> None:
        if not read and not written:
            return
        self.kernels += 1
        errors = self.event_handler._handle_kernel_launch(stream, read, written, set(), name, aliases)
        for error in errors:
            now, before = error.current_access, error.previous_access
            self.found.append(
                f"{now.operator} on stream {now.stream} does not wait for {before.operator} on stream {before.stream}"
            )
        for key in read | written:
            storage = self._by_key[key]
            storage.used_on[stream] = self.event_handler.seq_num, name
            if stream != storage.stream:
                self._shared[key] = storage

    def _key(self, tensor: Tensor) -> int:
        return self._storage(tensor).key

    def _storage(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None or known.alive.expired():
            stream = torch.accelerator.current_stream().stream_id
            self._check_freed(stream)
            known = _Storage(len(self._by_key), StorageWeakRef(storage), stream)
            self._storages[storage._cdata] = self._by_key[known.key] = known
        return known

    def _check_freed(self, stream: int) -> None:
        """The allocator hands freed memory to what is allocated next on the same stream."""
        syncs = self.event_handler.syncs
        freed = [s for s in self._shared.values() if s.stream == stream and s.alive.expired()]
        for storage in freed:
            for other, (number, name) in storage.used_on.items():
                ends = {stream, *storage.recorded}  # the allocator waits for the recorded streams as well
                if not any(syncs.is_ordered_after(end, number, other) for end in ends):
                    self.found.append(
                        f"memory of stream {stream} is freed while {name} on stream {other} uses it"
                    )
            del self._shared[storage.key]

    def note_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """`record_stream`: the allocator waits for what that stream has been given so far."""
        self._storage(tensor).recorded.add(stream.stream_id)

    # -- collectives --------------------------------------------------------------------------------------------------

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Those that start inside follow NCCL's contract. `record_stream` is noted."""
        streams: dict[Any, torch.Stream] = {}

        def start(name: str, group: Any, read: list[Tensor], written: list[Tensor], async_op: bool) -> Any:
            stream = streams.setdefault(group, torch.Stream(device="cuda"))
            stream.wait_event(torch.accelerator.current_stream().record_event())
            keys = {self._key(t) for t in written}
            inputs = {self._key(t) for t in read} - keys
            self._launch(stream.stream_id, inputs, keys, name, {key: [] for key in keys | inputs})
            work = _Work(stream.record_event(), [*read, *written])
            return work if async_op else work.wait() and None

        def all_reduce(
            tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            return start("all_reduce", group, [], [tensor], async_op)

        def all_gather(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
            return start("all_gather", group, [tensor], [output], async_op)

        def reduce_scatter(
            output: Tensor,
            tensor: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            return start("reduce_scatter", group, [tensor], [output], async_op)

        with (
            replaced(dist, "all_reduce", all_reduce),
            replaced(dist, "all_gather_single", all_gather),
            replaced(dist, "reduce_scatter_single", reduce_scatter),
            replaced(Tensor, "record_stream", lambda tensor, stream: self.note_stream(tensor, stream)),
        ):
            yield


class _Work:
    def __init__(self, done: torch.Event, tensors: list[Tensor]) -> None:
        self._done, self._tensors = done, tensors

    def wait(self, *_: Any) -> bool:
        torch.accelerator.current_stream().wait_event(self._done)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return False
