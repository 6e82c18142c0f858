"""Records what a rank does: every operator, every collective, and the memory of every tensor.

It runs below autograd, at the level of fake tensors, so that it sees forward, backward and the optimizer. In forward an
operator belongs to the module that was entered last; in backward to the module in which forward made the autograd node.

A tensor's memory is its storage: it appears with the first tensor in it and goes with the last. What a storage is *for*
may be known only later (a matmul's output becomes a gradient when it is sent), so categories are given to storages, and
the bytes are added up at the end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

# The number of autograd's next node in this thread; no public name (torch 2.13.0).
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fourfold.dry_run.events import Category, Event, Operation, Phase, Start, Trace, Wait
from fourfold.dry_run.operators import MATMULS, cast_bytes, work_of
from fourfold.mesh.collectives import InFlightCollective, Observer
from fourfold.mesh.grid import Grid

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
_INTO = {aten.mm.out, aten.addmm.out}


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Replace an attribute of a class or a module, and put it back; an inherited one is inherited again."""
    own = [vars(owner)[name]] if name in vars(owner) else []
    setattr(owner, name, by)
    try:
        yield
    finally:
        delattr(owner, name)
        if own:
            setattr(owner, name, own[0])


class Recorder(TorchDispatchMode, Observer):
    """Enter it inside of the fake tensor mode; the caller that runs the step sets `phase`.

    ``weights``: the blocks of weights by the module that their modules are in; what has their shape in backward is their
    gradient. By the one around them, because the first of several siblings computes for all. ``logits``: the width of the
    outputs of the head, and of what the loss makes of them, and the head's name.
    """

    # Half-batches, each in its thread, are recorded as well (`parallel/batch_split.py`).
    follows_threads = True

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        weights: Mapping[str, set[tuple[int, ...]]],
        logits: tuple[int, str] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.grid = grid
        self.events: list[Event] = []
        self.phase: Phase = "forward"
        self._changes: list[tuple[int, int, int]] = []  # (event, storage, bytes)
        self._bytes: dict[int, int] = {}  # of live storages
        self._before: dict[int, int] = {}
        self._number_of: dict[int, int] = {}  # storages by address, while they live
        self._categories: dict[int, Category] = {}
        self._next = 0
        self._flights: dict[int, tuple[InFlightCollective, Start]] = {}  # by identity
        self._names = {module: name for name, module in model.named_modules()}
        self._entered: dict[int, list[str]] = {}  # by thread
        self._module_of_node: dict[int, str] = {}
        self._last_module = ""
        self._weights = weights
        self._shapes = set().union(*weights.values())
        self._logits = logits

    def label(self, tensor: Tensor | None, category: Category) -> None:
        if tensor is None:
            return
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        self._categories[self._storage(tensor)] = category

    def start_over(self) -> None:
        """Forget the events so far, but not the memory."""
        self.events.clear()
        self._changes.clear()
        self._flights.clear()
        self._module_of_node.clear()
        self._before = dict(self._bytes)

    @property
    def position(self) -> tuple[int, int]:
        return len(self.events), len(self._changes)

    def repeat(self, since: tuple[int, int], times: int) -> None:
        """Record again what was recorded since that position, which ended with as much memory as it began with."""
        events, changes = self.events[since[0] :], self._changes[since[1] :]
        assert sum(size for _, _, size in changes) == 0
        self.events += events * times
        for turn in range(1, times + 1):
            self._changes += [(at + turn * len(events), number, size) for at, number, size in changes]

    def trace(self) -> Trace:
        """What was recorded since; storages by their final category."""
        before: dict[Category, float] = {}
        for storage, size in self._before.items():
            if size:
                category = self._categories[storage]
                before[category] = before.get(category, 0) + size
        changes: list[list[tuple[Category, float]]] = [[] for _ in range(len(self.events) + 1)]
        for event, storage, size in self._changes:
            changes[event].append((self._categories[storage], size))
        return Trace(tuple(self.events), changes, before)

    # -- modules ----------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operators, modules, collectives and resized storages inside are recorded."""

        def enter(module: nn.Module, args: Any) -> None:
            name = self._names.get(module)
            stack = self._entered.setdefault(threading.get_ident(), [])
            stack.append(name if name is not None else (stack[-1] if stack else ""))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._entered[threading.get_ident()].pop()

        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage)
            return out

        with ExitStack() as stack:
            stack.enter_context(_unrecorded_sharding())
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
            self.grid.collectives.observers.append(self)
            stack.callback(self.grid.collectives.observers.remove, self)
            with self:
                yield

    def _where(self) -> tuple[Phase, str]:
        """The phase and the module of what runs now."""
        in_backward = self.phase == "backward"
        stack = self._entered.get(threading.get_ident())
        if stack:
            self._last_module = stack[-1]
            if not in_backward:
                # The number of the node that autograd has made for this operator. What is recomputed makes nodes that never
                # run, in another thread perhaps, with numbers that others have already.
                self._module_of_node[_get_sequence_nr() - 1] = stack[-1]
            return ("recompute" if in_backward else self.phase), stack[-1]
        if not in_backward:
            if self.phase == "forward":
                self._module_of_node[_get_sequence_nr() - 1] = ""
            return self.phase, ""
        node = torch._C._current_autograd_node()
        if node is not None:
            self._last_module = self._module_of_node.get(node._sequence_nr(), self._last_module)
        return "backward", self._last_module

    # -- operators --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls are of this kind
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its operators on local tensors come here next
        kwargs = kwargs or {}
        if func.is_view and type(args[0]) is FakeTensor and args[0].constant is None:
            self._where()
            return _viewed(func, args, kwargs)
        # Fake tensors do not cache these, and their output is given.
        out = (
            kwargs["out"]
            if func in _INTO and _fits(args[-2], args[-1], kwargs["out"])
            else func(*args, **kwargs)
        )
        if func.namespace == "prim":
            return out
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        phase, module = self._where()
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fresh = [t for t in outputs if self._take(t, phase, module, func)]
        if self.grid.target == "cpu" and (copied := cast_bytes(func, args, kwargs)):
            self._for_a_moment(copied)
        if func.namespace == "c10d" or (not fresh and not func._schema.is_mutable):
            return out  # collectives report themselves; views do nothing
        if not inputs:
            return out  # memory was taken, no more
        done = work_of(func, args, kwargs, out)
        self.events.append(
            Operation(phase, module, str(func), done.work, done.flops, done.bytes_moved, done.shape)
        )
        return out

    # -- collectives (`collectives.Observer`) -----------------------------------------------------------------------

    def started(self, flight: InFlightCollective, *tensors: Tensor) -> None:
        phase, module = self._where()
        start = Start(
            phase,
            flight.module or module,
            flight.axis,
            flight.kind,
            flight.purpose,
            self.grid.size(flight.axis),
            flight.payload_bytes,
        )
        self._flights[id(flight)] = (flight, start)
        self.events.append(start)
        if flight.purpose == "weight":
            self.label(tensors[0], "gathered weights")
            self._label_new(tensors[1:], "communication buffers")
        elif flight.purpose == "gradient":
            for tensor in tensors[:2]:
                self.label(tensor, "gradients")
            self._label_new(tensors[2:], "communication buffers")

    def waited(self, flight: InFlightCollective) -> None:
        if id(flight) in self._flights:
            start = self._flights.pop(id(flight))[1]
            phase, _ = self._where()
            self.events.append(Wait(phase, start.module, start.axis, start.kind, start.purpose))

    # -- copies of block inputs (`copies.py`) -------------------------------------------------------------------------

    def copied(self, kind: Literal["to_host", "to_device"], module: str, size: int) -> Callable[[], None]:
        """A copy begins; what is returned waits for it."""
        phase, _ = self._where()
        self.events.append(Start(phase, module, "host", kind, "offloading", 1, size))

        def wait() -> None:
            phase, _ = self._where()
            self.events.append(Wait(phase, module, "host", kind, "offloading"))

        return wait

    def _label_new(self, tensors: tuple[Tensor, ...], category: Category) -> None:
        for tensor in tensors:
            if self._categories[self._storage(tensor)] == "activations":
                self.label(tensor, category)

    # -- memory -----------------------------------------------------------------------------------------------------

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._number_of.get(storage._cdata)
        if number is None:
            number = self._add(storage, "activations")
        return number

    def _take(self, tensor: Tensor, phase: Phase, module: str, func: Any) -> bool:
        """Is its memory new? Then count it from here on."""
        if isinstance(tensor, DTensor) or not hasattr(tensor, "untyped_storage"):
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in self._number_of:
            return False
        category: Category = "activations"
        if phase == "optimizer":
            category = "optimizer"
        elif (
            self._logits
            and tensor.ndim
            and tensor.shape[-1] == self._logits[0]
            and module in ("", self._logits[1])
        ):
            category = "logits"
        elif phase == "backward" and func._overloadpacket in MATMULS:
            shape = tuple(tensor.shape)
            if {shape, shape[::-1]} & self._weights.get(module.rpartition(".")[0], set()):
                category = "gradients"
        elif (
            # FSDP2 casts the gradients of a micro-batch that it does not reduce.
            phase == "backward"
            and func is aten._to_copy.default
            and tensor.dtype == torch.float32
            and tuple(tensor.shape) in self._shapes
        ):
            category = "gradients"
        self._add(storage, category)
        return True

    def _add(self, storage: torch.UntypedStorage, category: Category) -> int:
        number, address = self._next, storage._cdata
        self._next += 1
        self._number_of[address] = number
        self._categories[number] = category
        self._bytes[number] = 0
        self._change(number, storage.nbytes())
        weakref.finalize(storage, self._gone, address, number).atexit = False
        return number

    def _for_a_moment(self, size: int) -> None:
        number, self._next = self._next, self._next + 1
        self._categories[number] = "activations"
        self._bytes[number] = 0
        self._change(number, size)
        self._change(number, -size)
        del self._bytes[number]

    def _gone(self, address: int, number: int) -> None:
        self._change(number, -self._bytes[number])
        del self._bytes[number]
        if self._number_of.get(address) == number:
            del self._number_of[address]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        # Only weights that come and go are resized, FSDP2's and streamed ones.
        number = self._number_of.get(storage._cdata)
        if number is None:
            self._add(storage, "gathered weights")
            return
        self._categories[number] = "gathered weights"
        self._change(number, storage.nbytes() - self._bytes[number])

    def _change(self, number: int, size: int) -> None:
        if size:
            self._bytes[number] += size
            self._changes.append((len(self.events), number, size))


@contextmanager
def _unrecorded_sharding() -> Iterator[None]:
    """How DTensor finds the sharding of an output (torch 2.13.0): not recorded, from its cache, and without a search if it is clear.

    With fake tensors it would not use its cache, and would run an operator on whole ones to learn a shape. Its search among
    the shardings of four axes takes half a second for each shape of FSDP2's accumulated gradients.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator

    def propagate(schema: OpSchema) -> Any:
        first, *others = schema.args_spec
        if all(spec.placements == first.placements for spec in others):
            if schema.op is aten.add_.Tensor:
                return OutputSharding(first)
            if schema.op is aten._to_copy.default:
                meta: Any = first.tensor_meta
                changed = meta._replace(dtype=schema.kwargs_schema.get("dtype", meta.dtype))
                return OutputSharding(DTensorSpec(first.mesh, first.placements, changed))
        with _disable_current_modes():
            return propagator.propagate_op_sharding(schema)

    with replaced(propagator, "propagate_op_sharding_non_cached", propagate):
        yield


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """Views, half of all operators, as `FakeTensorMode` makes them (torch 2.13.0), in a third of the time that its cache takes."""
    given = args[0]
    with in_kernel_invocation_manager(given.fake_mode):
        out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return FakeTensor(given.fake_mode, out, given.fake_device)
    return [FakeTensor(given.fake_mode, part, given.fake_device) for part in out]


def _fits(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Can a product be written into ``out``? If not, PyTorch says why."""
    is_product = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]
    return is_product and out.shape == (a.shape[0], b.shape[1]) and a.dtype == b.dtype == out.dtype
