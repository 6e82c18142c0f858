"""Writes down what a step asks of a device and of the links, while it runs on tensors without values in one process.

Operators are seen below autograd, as in a dry run, and priced by the planner. Streams are those of `torch.cpu`, which FSDP2 uses on
CPU and which do nothing there: here they have CUDA's meaning. Collectives are seen as `c10d` and functional operators, so that those of
DTensor, FSDP2, DDP and Fourfold are all found. A collective begins when the stream that it was called on comes to it; `wait` makes
the stream wait, and not the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.slow_motion.program import COMPUTE, Program
from fourfold.dry_run.events import Operation
from fourfold.dry_run.operators import work_of
from fourfold.dry_run.recorder import replaced
from fourfold.planner.cost.compute import operation_s
from fourfold.planner.inputs.cluster import Cluster

_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
_IGNORED = {"broadcast_", "broadcast", "barrier", "wait_tensor"}


class Recorder(TorchDispatchMode):
    """Enter `recording` inside of the fake tensor mode."""

    # Half-batches, each in its thread, are recorded as well.
    follows_threads = True

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cluster = cluster
        self.program = Program()
        self._here = threading.local()
        self._by_storage: dict[int, int] = {}  # the event of a functional collective's output
        self._works: list[dist.Work] = []
        self._streams = 0

    @contextmanager
    def recording(self) -> Iterator[Program]:
        """What runs inside, as a new program; inside of `streams`."""
        self.program = Program()
        with self:
            yield self.program

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Inside, the streams and events of `torch.cpu` are those of the recorder. Models keep them: build and warm up inside, too."""
        recorder = self

        class Event:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.of: tuple[Program, int] | None = None

            def record(self, stream: Any = None) -> Event:
                name = stream.name if stream else recorder.stream
                self.of = recorder.program, recorder.program.record(name)
                return self

            def wait(self, stream: Any = None) -> None:
                if self.of is not None and self.of[0] is recorder.program:  # not of an earlier step
                    recorder.program.wait(stream.name if stream else recorder.stream, self.of[1])

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                self.wait()

        class Stream:
            def __init__(self, priority: int = 0, name: str = "") -> None:
                recorder._streams += 1
                self.name = name or f"stream {recorder._streams}"

            def wait_event(self, event: Any) -> None:
                event.wait(self)

            def wait_stream(self, stream: Any) -> None:
                if stream.name != self.name:
                    recorder.program.wait(self.name, recorder.program.record(stream.name))

            def record_event(self, event: Any = None) -> Event:
                return (event or Event()).record(self)  # type: ignore[no-any-return]

        @contextmanager
        def on(stream: Any) -> Iterator[None]:
            before = recorder.stream
            recorder._here.stream = stream.name if stream is not None else before
            try:
                yield
            finally:
                recorder._here.stream = before

        with ExitStack() as stack:
            for name, by in (
                ("Stream", Stream),
                ("Event", Event),
                ("stream", on),
                ("current_stream", lambda device=None: Stream(name=recorder.stream)),
            ):
                stack.enter_context(replaced(torch.cpu, name, by))
            yield

    @property
    def stream(self) -> str:
        return getattr(self._here, "stream", COMPUTE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its operators on local tensors come here next
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._sent(func, args, out)
        if func.namespace == "_c10d_functional":
            return self._sent_functionally(func, args, out)
        if func.namespace == "prim" or func.is_view:
            return out
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not inputs or not any(isinstance(t, FakeTensor) for t in (*inputs, *outputs)):
            return out
        known = {t.untyped_storage()._cdata for t in inputs}
        if not func._schema.is_mutable and all(t.untyped_storage()._cdata in known for t in outputs):
            return out
        done = work_of(func, args, kwargs, out)
        seconds = operation_s(
            Operation("forward", "", str(func), done.work, done.flops, done.bytes_moved, done.shape),
            self.cluster,
        )
        self.program.work(self.stream, seconds)
        return out

    def _sent(self, func: Any, args: Any, out: Any) -> Any:
        name = func._overloadpacket.__name__
        kind = _KINDS.get(name)
        if kind is None:
            if name in _IGNORED:
                return out
            raise NotImplementedError(f"{func}: a collective that slow motion does not know")
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        size = max(t.numel() * t.element_size() for t in tensors)
        group = next(g for a in args if (g := _process_group(a)) is not None)
        event = self._send(kind, dist.get_process_group_ranks(group), size)
        if event is None:
            return out
        work = _Work(self, event)
        self._works.append(work)  # its `wait` is Python's only as long as the object lives
        return (*out[:-1], work.boxed()) if isinstance(out, tuple) else work.boxed()

    def _sent_functionally(self, func: Any, args: Any, out: Any) -> Any:
        name = func._overloadpacket.__name__
        if name == "wait_tensor":
            event = self._by_storage.get(args[0].untyped_storage()._cdata)
            if event is not None:
                self.program.wait(self.stream, event)
            return out
        kind = _KINDS.get(name)
        if kind is None:
            raise NotImplementedError(f"{func}: a collective that slow motion does not know")
        group = dist.distributed_c10d._resolve_process_group(
            next(a for a in reversed(args) if isinstance(a, str))
        )
        tensors = [t for t in (args[0], *tree_leaves(out)) if isinstance(t, Tensor)]
        size = max(t.numel() * t.element_size() for t in tensors)
        event = self._send(kind, dist.get_process_group_ranks(group), size)
        if event is not None:
            storage = out.untyped_storage()
            self._by_storage[storage._cdata] = event
            weakref.finalize(storage, self._by_storage.pop, storage._cdata, None)
        return out

    def _send(self, kind: str, ranks: list[int], size: float) -> int | None:
        if len(ranks) == 1:
            return None
        stride = ranks[1] - ranks[0]
        if ranks != list(range(ranks[0], ranks[0] + stride * len(ranks), stride)):
            raise NotImplementedError(f"ranks {ranks} are not the same distance apart")
        return self.program.send(self.stream, kind, (stride, len(ranks)), size)


class _Work(dist._Work):  # type: ignore[name-defined,misc]
    def __init__(self, recorder: Recorder, event: int) -> None:
        super().__init__()
        self._recorder, self._event = recorder, event

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.program.wait(self._recorder.stream, self._event)
        return True


def _process_group(value: Any) -> Any:
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except RuntimeError:
            return None
    return None
