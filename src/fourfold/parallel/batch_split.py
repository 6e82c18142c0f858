"""Batch-split overlap: two half-batches alternate, so that one computes while a collective of the other is in flight.

A linear's own matmuls are often shorter than the collective after them; then chunks and weight gradients cannot hide it.
The work of the other half of the sequences can. Each half runs the model's own forward in a thread of its own. Only one
of the two runs at a time, and they switch where the running one would wait for a collective. So the order of collectives
is the same on all ranks, and on CUDA all kernels are in one stream.

Backward is one pass over both graphs. Of the nodes that are ready, autograd runs the one that was made last, by a sequence
number that each thread counts for itself. A *section* reaches from one operation with a collective in backward to the
next. The threads' numbers are set so that backward runs the section of one half, then the same section of the other,
while the collective that ended the first is in flight.
"""

from __future__ import annotations

import functools
import inspect
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

# Counts the nodes that this thread made; there is no public name for it (torch 2.13.0).
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fourfold.errors import UnsupportedError
from fourfold.mesh.grid import Grid
from fourfold.parallel.loss.cross_entropy import loss_of
from fourfold.parallel.loss.head import LazyLogits
from fourfold.parallel.sequence import Tokens
from fourfold.weights.overlap import Overlap

HALVES = 2
# Arguments of a Hugging Face causal LM that have a row for each sequence.
_BY_ROW = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "labels",
    "shift_labels",
    "row_checksums",
)


def why_not_split(
    model: nn.Module, overlap: Overlap, grid: Grid, *, streamed: bool, uses_dropout: bool
) -> str | None:
    """Why a batch goes through in one piece; None if its halves alternate."""
    if grid.x * grid.y == 1:
        return "no activation is sent"
    if "input_ids" not in inspect.signature(model.forward).parameters or not hasattr(model, "loss_function"):
        return "not a Hugging Face causal LM, whose half-batches can be joined"
    if not streamed:
        return "FSDP2 takes one forward at a time; use weights='streamed'"
    if uses_dropout:
        return "the halves would draw each other's random numbers; use a dropout of 0"
    if overlap.interleave == "auto" and grid.target == "cuda":
        return "auto: not measured on CUDA yet; use Overlap(interleave=True)"
    if overlap.interleave is False:
        return "asked for"
    return None


class Group(Protocol):
    """Linears that send activations together (`linear.FusedLinearGroup`)."""

    settled: bool


def split_batches(
    model: nn.Module,
    split: BatchSplit,
    groups: Sequence[Group],
    count: Callable[[Any, Any, int | None], Callable[[], Tensor]],
    tokens: Tokens | None = None,
) -> None:
    """Let ``model`` compute the two halves of its batch alternately.

    A batch that cannot be split by rows (one sequence, an unknown argument) goes through in one piece. ``count`` returns the
    number of labels of the global batch that count, given labels, shifted labels and the value to ignore. Where ``tokens`` are
    sharded, halves that cannot be sharded alike go through in one piece as well.
    """
    inner = model.forward
    names = list(inspect.signature(inner).parameters)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        halves = _halve(names, args, kwargs, count)
        if halves is None or not _shard_alike(halves, tokens) or torch.is_inference_mode_enabled():
            return inner(*args, **kwargs)
        if not all(group.settled for group in groups):
            # Which linears share an input shows in a forward of one piece. It is an extra one, so that all steps are in
            # halves: a run that resumes in a new process has the values of one that was never interrupted.
            with torch.no_grad():
                inner(**halves[0])
        return _join(split.run([functools.partial(inner, **half) for half in halves]))

    model.forward = forward


class BatchSplit:
    """Two threads, of which one runs at a time."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._workers: list[_Worker] = []
        self._forward: _Forward | None = None
        # Autograd's sequence numbers: the highest in use, and how many a section has at most, as far as is known.
        self._highest, self._longest = 0, 0

    @staticmethod
    def of(grid: Grid) -> BatchSplit:
        """That of the grid: all its models share the threads, as one forward runs at a time."""
        made: BatchSplit = grid.collectives.__dict__.setdefault("_batch_split", BatchSplit(grid))
        return made

    def half_batches(self) -> int:
        """How many parts of a batch are in the model now."""
        return 1 if self._forward is None else HALVES

    def run(self, halves: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what the halves return. If one fails, raise its error when the other has stopped."""
        modes = _get_current_dispatch_mode_stack()
        if not all(isinstance(m, FakeTensorMode) or getattr(m, "follows_threads", False) for m in modes):
            # A mode (a counter of FLOPs) belongs to this thread: run the halves one after the other.
            return [half() for half in halves]
        if not self._workers:
            self._workers = [_Worker() for _ in range(HALVES)]
        forward = _Forward(first_number=self._highest, gap=(self._longest or _FIRST_GUESS) + 1)
        collectives = self.grid.collectives
        self._forward, collectives.interleaving = forward, self
        try:
            state = _ThreadState(self.grid.device)
            finished = [
                worker.start(functools.partial(self._run_half, forward, i, half, state))
                for i, (worker, half) in enumerate(zip(self._workers, halves, strict=True))
            ]
            forward.go[0].release()
            for event in finished:
                event.wait()
        finally:
            self._forward = collectives.interleaving = None
        self._longest = max(self._longest, forward.longest)
        if forward.error is not None:
            raise forward.error
        return forward.results

    def _run_half(self, forward: _Forward, half: int, work: Callable[[], Any], state: _ThreadState) -> None:
        forward.go[half].acquire()
        forward.half_of[threading.get_ident()] = half
        try:
            # If the other half failed before this one began, its collectives would find no peers.
            if forward.error is None:
                with state.entered():
                    forward.section_start[half] = _get_sequence_nr()
                    self.begin_section()
                    forward.results[half] = work()
        except _Abandoned:
            pass
        except BaseException as error:
            forward.error = forward.error or error
        finally:
            self._highest = max(self._highest, _get_sequence_nr())
            forward.is_over[half] = True
            forward.go[1 - half].release()

    def switch(self) -> None:
        """This half would wait now: let the other one run, until that would wait or is over."""
        forward = self._forward
        half = None if forward is None else forward.half_of.get(threading.get_ident())
        if forward is None or half is None or forward.is_over[1 - half]:
            return
        forward.go[1 - half].release()
        forward.go[half].acquire()
        if forward.error is not None:
            raise _Abandoned

    def begin_section(self) -> None:
        """In backward, the nodes that this half makes from here on run apart from the other half's part of the section."""
        forward = self._forward
        half = None if forward is None else forward.half_of.get(threading.get_ident())
        if forward is None or half is None or not torch.is_grad_enabled():
            return
        forward.longest = max(forward.longest, _get_sequence_nr() - forward.section_start[half])
        number = forward.first_number + (HALVES * forward.section[half] + half) * forward.gap
        forward.section[half] += 1
        # The counter only moves when a node is made; whoever watches operators need not see these.
        with torch._C._DisableTorchDispatch():
            while _get_sequence_nr() < number:
                _PROBE.view_as(_PROBE)
        forward.section_start[half] = _get_sequence_nr()


_PROBE = torch.zeros((), requires_grad=True)
# Nodes between two collectives of backward. Too few cost overlap, too many cost time, in the first forward alone.
_FIRST_GUESS = 128


@dataclass
class _Forward:
    """One forward of both halves."""

    first_number: int
    gap: int
    go: list[threading.Semaphore] = field(
        default_factory=lambda: [threading.Semaphore(0) for _ in range(HALVES)]
    )
    half_of: dict[int, int] = field(default_factory=dict)  # by thread
    is_over: list[bool] = field(default_factory=lambda: [False] * HALVES)
    results: list[Any] = field(default_factory=lambda: [None] * HALVES)
    error: BaseException | None = None
    section: list[int] = field(default_factory=lambda: [0] * HALVES)
    section_start: list[int] = field(default_factory=lambda: [0] * HALVES)
    longest: int = 0


class _Abandoned(Exception):
    """The other half failed."""


class _Worker:
    """A thread that stays: the numbers it gives to autograd's nodes go on from forward to forward."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def start(self, task: Callable[[], None]) -> threading.Event:
        finished = threading.Event()
        self._tasks.put((task, finished))
        return finished

    def _work(self) -> None:
        while True:
            task, finished = self._tasks.get()
            task()
            del task  # it holds the batch and the results
            finished.set()


class _ThreadState:
    """What PyTorch keeps for each thread, as it is in this one."""

    def __init__(self, device: torch.device) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kind = device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self._stream = torch.cuda.current_stream(device) if kind == "cuda" else None
        self._modes = _get_current_dispatch_mode_stack()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._stream is not None:
                # A thread begins on device 0, where anything that it does would open a context.
                torch.cuda.set_device(self._stream.device)
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(torch.inference_mode(self._inference))
            if not self._inference:
                stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._autocast[0], self._autocast[1]))
            for mode in self._modes:
                stack.enter_context(mode)
            yield


def _halve(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: Callable[[Any, Any, int | None], Callable[[], Tensor]],
) -> list[dict[str, Any]] | None:
    """The arguments of each half; None where the batch cannot be split."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    batch = given.get("input_ids")
    batch = given.get("inputs_embeds") if batch is None else batch
    if not isinstance(batch, Tensor) or batch.shape[0] < HALVES:
        return None
    if given.get("use_cache"):
        return None  # what it gives back is not made of rows
    by_row = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and name != "num_items_in_batch":
            if name not in _BY_ROW:
                return None
            if value.shape[0] == batch.shape[0]:
                by_row[name] = value.chunk(HALVES)
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if given.get("num_items_in_batch") is None and (labels is not None or shifted is not None):
        # The mean over the global batch, not over a half of it.
        given["num_items_in_batch"] = count(labels, shifted, given.get("ignore_index"))()
    return [{**given, **{name: halves[i] for name, halves in by_row.items()}} for i in range(HALVES)]


def _shard_alike(halves: Sequence[dict[str, Any]], tokens: Tokens | None) -> bool:
    """Are the halves equal, and can the tokens of each be sharded over the ranks?"""
    if tokens is None:
        return True
    shapes = {tuple(ids.shape) for half in halves if isinstance(ids := half.get("input_ids"), Tensor)}
    return len(shapes) == 1 and all(map(tokens.divide, shapes))


def _join(outputs: list[Any]) -> Any:
    """Join the outputs of the halves: rows after rows, and the sum of the losses."""
    leaves, structure = tree_flatten(outputs[0])
    loss = loss_of(outputs[0])
    joined = []
    for first, second in zip(leaves, tree_leaves(outputs[1]), strict=True):
        if first is loss:
            joined.append(first + second)
        elif isinstance(first, LazyLogits):
            joined.append(LazyLogits.joined([first, second]))
        elif isinstance(first, Tensor) and first.ndim > 0:
            joined.append(torch.cat([first, second]))
        elif not isinstance(first, Tensor) and first == second:
            joined.append(first)
        else:
            what = "a scalar" if isinstance(first, Tensor) else f"a {type(first).__name__}"
            raise UnsupportedError(
                f"the model's output holds {what} alongside its loss, which cannot be joined from two half-batches; use "
                "overlap=Overlap(interleave=False)"
            )
    return tree_unflatten(joined, structure)
