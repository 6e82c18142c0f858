"""How the benchmarks measure: side by side, interleaved, in one run.

Every figure is a ratio of medians of times that were taken in turns, round after round, so that what the machine does
besides hits all alike. Ranks meet before each time is taken; a step takes as long as its slowest rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from benchmarks.cluster import set_rate
from fourfold.mesh.collectives import Collectives, InFlightCollective, Pending
from fourfold.mesh.grid import Grid

IN_FLIGHT = 4
ROUNDS = 7  # odd, so that the median is a time that was measured


@dataclass(frozen=True)
class Times:
    """Seconds of one way to do it, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range between the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median_s

    def __str__(self) -> str:
        return f"{self.median_s:.3f} s ±{self.spread:.1%}"


def ratio(ours: Times, theirs: Times) -> float:
    """The median over the rounds of ours / theirs, each from one round: what drifts slowly cancels."""
    return statistics.median(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))


def interleaved(ways: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Times]:
    """Time each way once in every round; the slowest rank counts. Call on all ranks, warmed up before."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        # Each round begins with another one, so that nobody always follows the same.
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(timed(ways[name]))
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the slowest rank has done it."""
    dist.barrier()
    start_s = time.perf_counter()
    work()
    taken_s = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(taken_s, dist.ReduceOp.MAX)
    return float(taken_s)


def in_fresh_world(work: Callable[..., Any], *args: Any) -> Any:
    """What ``work`` returns (as JSON can say it), called in a copy of this process that joins a world of its own.

    Call on all ranks, before any of them has joined one. A thread of Gloo wakes up a hundred times a second for each group
    that a process ever made, used or not: after twenty layouts on eight ranks that is most of what two cores do.
    """
    global _worlds
    _worlds += 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive who waits for it
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.PrefixStore(f"world {_worlds}", dist.TCPStore(address, port, is_master=False))
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600)
            )
            with os.fdopen(writer, "w") as out:
                json.dump(work(*args), out)
            dist.barrier()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a rank's copy ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(said)


_worlds = 0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


# -- the model ----------------------------------------------------------------------------------------------------------


def llama(
    hidden: int = 512, layers: int = 6, heads: int = 8, vocabulary: int = 2048, kv_heads: int | None = None
) -> LlamaConfig:
    """Llama's proportions, at a size for CPUs."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        vocab_size=vocabulary,
        attn_implementation="sdpa",
    )


def batch(config: LlamaConfig, sequences: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (sequences, length), generator=generator)


def build(config: LlamaConfig, grid: Grid, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ff.parallelize(model, grid, seed=0, **options)
    return model


def stepper(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    """Forward and backward; the optimizer sends nothing."""

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    return step


# -- the two halves of a step: computation alone, communication alone ------------------------------------------------------


@contextmanager
def silent() -> Iterator[None]:
    """Nothing is sent: each rank takes its own part for that of all. The work is the same, the numbers are not."""

    def all_reduce(self: Collectives, tensor: Tensor, *_: Any, **__: Any) -> Pending:
        return Pending()

    def all_gather(
        self: Collectives, output: Tensor, tensor: Tensor, axis: Any, *_: Any, **__: Any
    ) -> Pending:
        output.view(self.size(axis), -1).copy_(tensor.view(1, -1).expand(self.size(axis), -1))
        return Pending()

    def reduce_scatter(self: Collectives, output: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Pending:
        output.view(-1).copy_(tensor.view(-1)[: output.numel()])
        return Pending()

    saved = Collectives.all_reduce, Collectives.all_gather, Collectives.reduce_scatter
    Collectives.all_reduce = all_reduce  # type: ignore[method-assign, assignment]
    Collectives.all_gather = all_gather  # type: ignore[method-assign, assignment]
    Collectives.reduce_scatter = reduce_scatter  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Collectives.all_reduce, Collectives.all_gather, Collectives.reduce_scatter = saved  # type: ignore[method-assign]


def record(step: Callable[[], Any], grid: Grid) -> list[InFlightCollective]:
    """Every collective of a step."""
    with grid.collectives.recording() as flights:
        step()
    return flights


def replay(flights: Sequence[InFlightCollective], grid: Grid) -> Callable[[], None]:
    """The communication of a step alone: the same collectives on the same axes, in the same order.

    A few are in flight at a time, so that a link is not idle between two of them.
    """
    ours = grid.collectives
    largest = max((f.payload_bytes for f in flights), default=0) // 4 + 1
    # Buffers of their own for what is in flight together.
    buffers = [(torch.zeros(largest), torch.zeros(largest)) for _ in range(IN_FLIGHT)]

    def run() -> None:
        under_way: deque[Pending] = deque()
        for i, flight in enumerate(flights):
            if len(under_way) == IN_FLIGHT:
                under_way.popleft().wait()
            numel, size = flight.payload_bytes // 4, ours.size(flight.axis)
            whole, part = buffers[i % IN_FLIGHT]
            if flight.kind == "all_reduce":
                pending = ours.all_reduce(whole[:numel], flight.axis, flight.purpose)
            elif flight.kind == "all_gather":
                pending = ours.all_gather(whole[:numel], part[: numel // size], flight.axis, flight.purpose)
            else:
                pending = ours.reduce_scatter(
                    part[: numel // size], whole[:numel], flight.axis, flight.purpose
                )
            under_way.append(pending)
        for pending in under_way:
            pending.wait()

    return run


def sent_bytes(flights: Sequence[InFlightCollective], grid: Grid) -> float:
    """What a rank sends for them, as a ring sends it."""
    total = 0.0
    for flight in flights:
        size = grid.collectives.size(flight.axis)
        total += (2 if flight.kind == "all_reduce" else 1) * flight.payload_bytes * (size - 1) / size
    return total


def balance(compute_s: float, communicate: Callable[[], None], first_mbit: float) -> float:
    """The rate of the links, set, at which communication alone takes as long as computation alone."""
    mbit = first_mbit
    for _ in range(4):
        change_rate(mbit)
        taken_s = statistics.median(timed(communicate) for _ in range(3))
        mbit *= taken_s / compute_s
    change_rate(mbit)
    return mbit


def change_rate(mbit: float | None) -> None:
    """Set the rate of all links of the emulated cluster; call on all ranks."""
    if dist.get_rank() == 0:
        set_rate(mbit)
    dist.barrier()


# -- ranks write, the command reads ------------------------------------------------------------------------------------------


def end_rank() -> NoReturn:
    """End this process, all is done.

    Without Python's way out: a thread of Gloo that lets go of a tensor meanwhile would abort the process.
    """
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def save(path: str | Path, results: Mapping[str, Any]) -> None:
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(results, default=lambda value: asdict(value)))
