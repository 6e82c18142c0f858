"""Two halves of a batch take turns: while the all-reduce of one is in flight, the other computes.

A linear's own matmuls are often shorter than the all-reduce behind them; then chunks and weight gradients cannot hide it.
The work of the other half of the sequences can. Each half, a *lane*, runs the model's own forward in a thread of its
own; only one of the two runs at a time, and they change where the running one would wait for a sum over ranks. So the
order of collectives is the same on all ranks, and on CUDA all kernels are in one stream.

Backward is one pass over both graphs. Autograd takes, of what is ready, the node that was made last, by a number that
each thread counts for itself. A *section* reaches from one operation with a backward all-reduce to the next; the
lanes' numbers are set so that backward runs the section of one lane, then the same section of the other, while the all-reduce
that ended the first is in flight.
"""

from __future__ import annotations

import functools
import inspect
import queue
import threading
import time
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
from fourfold.mesh.clock import moment
from fourfold.mesh.grid import Grid
from fourfold.parallel.loss import loss_of
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
)


def why_not(
    model: nn.Module, overlap: Overlap, grid: Grid, *, streamed: bool, uses_dropout: bool
) -> str | None:
    """Why a batch goes through in one piece; None if its halves take turns."""
    if grid.x * grid.y == 1:
        return "no activation is sent"
    if "input_ids" not in inspect.signature(model.forward).parameters or not hasattr(model, "loss_function"):
        return "not a Hugging Face causal LM, whose halves can be put together"
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
    """What takes part: linears that send activations (`linear.SiblingGroup`)."""

    settled: bool


def interleave(
    model: nn.Module,
    lanes: BatchSplit,
    groups: Sequence[Group],
    count: Callable[[Any, Any, int | None], Tensor],
    tokens: Tokens | None = None,
) -> None:
    """Let ``model`` compute the two halves of its batch in turns.

    What cannot be halved by its rows (one sequence, an unknown argument) goes through in one piece. ``count`` tells how many
    labels of the global batch count, of labels, labels that are shifted already, and what stands for none. Where
    ``tokens`` are cut, halves that cannot be cut alike go in one piece as well.
    """
    inner = model.forward
    names = list(inspect.signature(inner).parameters)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        halves = _halve(names, args, kwargs, count)
        if halves is None or not _cut_alike(halves, tokens) or torch.is_inference_mode_enabled():
            return inner(*args, **kwargs)
        if not all(group.settled for group in groups):
            # Who are siblings shows in a forward of one piece. It is one more, so that all steps are in halves: a run that goes
            # on in a new process has the numbers of one that was never interrupted.
            with torch.no_grad():
                inner(**halves[0])
        return _join(lanes.run([functools.partial(inner, **half) for half in halves]))

    model.forward = forward


class BatchSplit:
    """Two threads, of which one runs at a time."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._workers: list[_Worker] = []
        self._turn: _Turn | None = None
        # Autograd's numbers: the highest in use, and how many a section has at most, as far as is known.
        self._highest, self._longest = 0, 0

    @staticmethod
    def of(grid: Grid) -> BatchSplit:
        """Those of the grid: all its models share them, as one forward runs at a time."""
        if not isinstance(grid.collectives.turns, BatchSplit):
            grid.collectives.turns = BatchSplit(grid)
        return grid.collectives.turns

    def count(self) -> int:
        """How many are in the model at this moment."""
        return 1 if self._turn is None else HALVES

    def run(self, lanes: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the lanes return. If one fails, its error is raised when the other has stopped."""
        modes = _get_current_dispatch_mode_stack()
        if not all(isinstance(m, FakeTensorMode) or getattr(m, "follows_threads", False) for m in modes):
            # A mode (a counter of FLOPs) belongs to this thread: the lanes run one after the other.
            return [lane() for lane in lanes]
        if not self._workers:
            self._workers = [_Worker() for _ in range(HALVES)]
        turn = self._turn = _Turn(first_number=self._highest, gap=(self._longest or _FIRST_GUESS) + 1)
        state = _ThreadState(self.grid.device)
        finished = [
            worker.start(functools.partial(self._run_lane, turn, i, lane, state))
            for i, (worker, lane) in enumerate(zip(self._workers, lanes, strict=True))
        ]
        turn.passed_on_s = time.perf_counter()
        turn.go[0].release()
        for event in finished:
            event.wait()
        self._turn = None
        self._longest = max(self._longest, turn.longest)
        if turn.error is not None:
            raise turn.error
        return turn.results

    def _run_lane(self, turn: _Turn, lane: int, work: Callable[[], Any], state: _ThreadState) -> None:
        turn.go[lane].acquire()
        self._take_up(turn)
        turn.lane_of[threading.get_ident()] = lane
        try:
            with state.entered():
                turn.section_start[lane] = _get_sequence_nr()
                self.begin_section()
                turn.results[lane] = work()
        except _Abandoned:
            pass
        except BaseException as error:
            turn.error = turn.error or error
        finally:
            self._highest = max(self._highest, _get_sequence_nr())
            turn.over[lane] = True
            self._lay_down(turn)
            turn.go[1 - lane].release()

    def pass_on(self) -> None:
        """This lane would wait now: it is the other one's turn, until that would wait or is over."""
        turn = self._turn
        lane = None if turn is None else turn.lane_of.get(threading.get_ident())
        if turn is None or lane is None or turn.over[1 - lane]:
            return
        self._lay_down(turn)
        turn.go[1 - lane].release()
        turn.go[lane].acquire()
        self._take_up(turn)
        if turn.error is not None:
            raise _Abandoned

    # Who measures a step counts what a lane does in its turn, and the change of lanes by the clock: in it both are awake.

    def _lay_down(self, turn: _Turn) -> None:
        if self.grid.collectives.measures_computing:
            turn.passed_on_s, now_busy_s = moment()
            self.grid.collectives.add_computing(now_busy_s - turn.busy_before_s)

    def _take_up(self, turn: _Turn) -> None:
        if self.grid.collectives.measures_computing:
            now_s, turn.busy_before_s = moment()
            self.grid.collectives.add_computing(now_s - turn.passed_on_s)

    def begin_section(self) -> None:
        """What this lane makes from here on runs, in backward, apart from the other lane's part of the section."""
        turn = self._turn
        lane = None if turn is None else turn.lane_of.get(threading.get_ident())
        if turn is None or lane is None or not torch.is_grad_enabled():
            return
        turn.longest = max(turn.longest, _get_sequence_nr() - turn.section_start[lane])
        number = turn.first_number + (HALVES * turn.section[lane] + lane) * turn.gap
        turn.section[lane] += 1
        # The counter only moves when a node is made; whoever watches operators need not see these.
        with torch._C._DisableTorchDispatch():
            while _get_sequence_nr() < number:
                _PROBE.view_as(_PROBE)
        turn.section_start[lane] = _get_sequence_nr()


_PROBE = torch.zeros((), requires_grad=True)
# Nodes between two all-reduces of backward. Too few cost overlap, too many time, in the first forward alone.
_FIRST_GUESS = 128


@dataclass
class _Turn:
    """One forward of both lanes."""

    first_number: int
    gap: int
    go: list[threading.Semaphore] = field(
        default_factory=lambda: [threading.Semaphore(0) for _ in range(HALVES)]
    )
    lane_of: dict[int, int] = field(default_factory=dict)  # by thread
    over: list[bool] = field(default_factory=lambda: [False] * HALVES)
    results: list[Any] = field(default_factory=lambda: [None] * HALVES)
    error: BaseException | None = None
    section: list[int] = field(default_factory=lambda: [0] * HALVES)
    section_start: list[int] = field(default_factory=lambda: [0] * HALVES)
    longest: int = 0
    # When the turn passed on, and what the one whose turn it is had computed before.
    passed_on_s: float = 0.0
    busy_before_s: float = 0.0


class _Abandoned(Exception):
    """The other lane failed."""


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
    count: Callable[[Any, Any, int | None], Tensor],
) -> list[dict[str, Any]] | None:
    """The arguments of each lane; None where the batch cannot be halved."""
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
        given["num_items_in_batch"] = count(labels, shifted, given.get("ignore_index"))
    return [{**given, **{name: halves[i] for name, halves in by_row.items()}} for i in range(HALVES)]


def _cut_alike(halves: Sequence[dict[str, Any]], tokens: Tokens | None) -> bool:
    """Are the halves equal, can the tokens of each be dealt out to the ranks, and is no work repeated for it?"""
    if tokens is None:
        return True
    shapes = {tuple(ids.shape) for half in halves if isinstance(ids := half.get("input_ids"), Tensor)}
    if len(shapes) != 1:
        return False
    (shape,) = shapes
    return tokens.divide(shape) and not tokens.halves_repeat(HALVES * shape[0])


def _join(outputs: list[Any]) -> Any:
    """One output of the lanes' two: rows after rows, and the sum of the losses."""
    leaves, structure = tree_flatten(outputs[0])
    loss = loss_of(outputs[0])
    joined = []
    for first, second in zip(leaves, tree_leaves(outputs[1]), strict=True):
        if first is loss:
            joined.append(first + second)
        elif isinstance(first, Tensor) and first.ndim > 0:
            joined.append(torch.cat([first, second]))
        elif not isinstance(first, Tensor) and first == second:
            joined.append(first)
        else:
            what = "a number" if isinstance(first, Tensor) else f"a {type(first).__name__}"
            raise UnsupportedError(
                f"the model's output holds {what} beside its loss, which two halves of a batch cannot be put together "
                "to; use overlap=Overlap(interleave=False)"
            )
    return tree_unflatten(joined, structure)
