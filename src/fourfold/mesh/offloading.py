"""Offload of the inputs of recomputed blocks: from forward to backward they are in pinned host memory.

A block that backward recomputes keeps its input. Here the input is copied to the host on a stream of its own while the block
computes; the next block waits for the copy, and the device memory is free. While backward is in a block, the input of the block before
it is copied back. The last input is still on the device when backward begins, and stays there.

The host waits for nothing. Streams wait for each other by events, so that memory is freed at the same place in every step, however far the host is
ahead; `record_stream` is for an input that is dropped while a copy of it is under way, as after a forward without backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fourfold.errors import UnsupportedError
from fourfold.mesh.grid import Grid


@dataclass
class Copy:
    """A copy that was started. What the device computes after `wait` comes after the copy."""

    result: Any  # a tensor on the device, or what the same `Copies` take as being on the host
    wait: Callable[[], None]


class Copies(Protocol):
    """Copies between a device and the host, one after another, next to what the device computes.

    Each begins after what the device was given to compute before it. ``name`` is the block's.
    """

    def to_host(self, tensor: Tensor, name: str) -> Copy: ...

    def to_device(self, on_host: Any, name: str) -> Copy: ...

    def will_free(self, tensor: Tensor) -> None:
        """Nobody waits for the last copy of ``tensor`` before its memory is freed."""

    def take_back(self, on_host: Any) -> None:
        """The memory on the host can be used again."""


class Offloading:
    """The inputs of the blocks of one model."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        # The latest input of this thread: half-batches have threads of their own.
        self._mine = threading.local()

    @contextmanager
    def keeping(self, args: tuple[Any, ...], name: str) -> Iterator[None]:
        """What autograd keeps inside of the first tensor of ``args``, the input of a block, is offloaded."""
        if not torch.is_grad_enabled():
            yield
            return
        input = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if input is None:
            raise UnsupportedError(
                f"{name} gets its input by its name, and activation_offloading=True is for the first argument of a block; use "
                "activation_offloading=False"
            )
        # An alias does not keep the graph of the block before, and knows of changes in place. Hooks may outlive the block.
        given = [input.detach()]

        def pack(tensor: Tensor) -> Any:
            is_input = bool(given) and _is_same(tensor, given[0])
            return self._keep(given[0], name) if is_input else tensor

        def unpack(kept: Any) -> Any:
            return kept.take() if isinstance(kept, _Input) else kept

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            given.clear()

    def _keep(self, tensor: Tensor, name: str) -> _Input:
        before: _Input | None = getattr(self._mine, "latest", lambda: None)()
        if before is not None:
            before.leave_device()
        kept = _Input(tensor, name, self._copies, before)
        self._mine.latest = weakref.ref(kept)
        return kept


class _Input:
    """The input of a block in one forward: on the device, on the host, or both."""

    def __init__(self, tensor: Tensor, name: str, copies: Copies, before: _Input | None) -> None:
        self._name, self._copies, self._version = name, copies, tensor._version
        # The input of the block before: backward needs it next.
        self._before = weakref.ref(before) if before is not None else None
        self._device: Tensor | None = tensor
        self._is_own = True  # until it has been on the host
        self._copy = copies.to_host(tensor, name)
        self._host = self._copy.result

    def leave_device(self) -> None:
        """The next block begins: free the memory, when the copy is done."""
        if self._device is not None:
            self._wait()
            self._device = None

    def prefetch(self) -> None:
        if self._device is None:
            self._copy, self._is_own = self._copies.to_device(self._host, self._name), False
            self._device = self._copy.result

    def take(self) -> Tensor:
        """Backward has come to the block."""
        self.prefetch()
        tensor = self._wait()
        self._device = None
        before = self._before() if self._before is not None else None
        if before is not None:
            before.prefetch()
        return tensor

    def _wait(self) -> Tensor:
        assert self._device is not None
        self._copy.wait()
        if self._is_own and self._device._version != self._version:
            raise UnsupportedError(
                f"the input of {self._name} is changed in place while it is copied to the host; use activation_offloading=False"
            )
        return self._device

    def __del__(self) -> None:
        if self._device is not None:
            self._copies.will_free(self._device)
        self._copies.take_back(self._host)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Are these the same elements in the same memory? What autograd saves is another object."""
    return (
        tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
        and tensor.storage_offset() == other.storage_offset()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
    )


# -- on CUDA ----------------------------------------------------------------------------------------------------------


def copies_of(grid: Grid) -> Copies | None:
    """None where inputs are in the memory of the host already."""
    return CudaCopies(grid.device) if grid.device.type == "cuda" else None


class CudaCopies:
    """Copies on one stream, so that memory on the host needs no event before it is used again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._memory = HostMemory()

    def to_host(self, tensor: Tensor, name: str) -> Copy:
        return self._copy(tensor, self._memory.take(tensor))

    def to_device(self, on_host: Tensor, name: str) -> Copy:
        # On the current stream, which computes with it, and frees it.
        return self._copy(on_host, torch.empty_like(on_host, device=self._device))

    def will_free(self, tensor: Tensor) -> None:
        # Python may drop an input while it traces a graph, in a mode in which tensors are not real.
        with torch._C._DisableTorchDispatch():
            tensor.record_stream(self._stream)

    def take_back(self, on_host: Tensor) -> None:
        self._memory.take_back(on_host)

    def _copy(self, source: Tensor, target: Tensor) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = self._stream.record_event()
        return Copy(target, lambda: torch.cuda.current_stream(self._device).wait_event(done))


_pinned = partial(torch.empty_strided, pin_memory=True)


class HostMemory:
    """Pinned tensors that are used again, of the latest size; those of others go back to PyTorch.

    PyTorch's allocator of pinned memory rounds up to powers of two, and frees a tensor when the host sees that the device has used it.
    """

    def __init__(self, allocate: Callable[..., Tensor] = _pinned) -> None:
        self._allocate = allocate
        self._size: tuple[Any, ...] = ()
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        # `empty_like` keeps the strides if elements lie side by side, so that a block computes as before.
        size = like.shape, torch.empty_like(like, device="meta").stride(), like.dtype
        if size != self._size:
            self._size, self._free = size, []
        shape, stride, dtype = size
        return self._free.pop() if self._free else self._allocate(shape, stride, dtype=dtype)

    def take_back(self, tensor: Tensor) -> None:
        if (tensor.shape, tensor.stride(), tensor.dtype) == self._size:
            self._free.append(tensor)
