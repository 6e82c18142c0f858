"""What calibration measures on the ranks: collectives, operators, and both at the same time.

Every rank runs this at the same time, as in a training step, so the results include what ranks share, such as a node's
link. Collectives are those of the engine. A time is that of the slowest rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fourfold.mesh.axes import divisors
from fourfold.mesh.clock import clock_of
from fourfold.mesh.collectives import Collectives, Kind, Pending
from fourfold.planner.inputs.measured import spread

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
_LEAST, _MOST = 3, 15  # repetitions
# Short calls are repeated within a repetition until it takes at least this long.
_CALLS_S = 0.1
_REPETITIONS_S = 0.6  # for all repetitions of one measurement
_TOGETHER_S = 0.3


class Timing(NamedTuple):
    """Seconds over repetitions: the median, and the range between the quartiles."""

    median_s: float
    spread_s: float


def is_past(deadline_s: float) -> bool:
    """Has the time of `time.monotonic` come on any rank? After it no new measurement starts."""
    return bool(_slowest(time.monotonic() > deadline_s))


def positions(world: int) -> list[tuple[int, int]]:
    """(ranks, inner ranks) of every axis that a grid of ``world`` ranks can have.

    Example:
        >>> positions(4)
        [(2, 1), (2, 2), (4, 1)]
    """
    sizes = divisors(world)
    return [(r, i) for r in sizes if r > 1 for i in sizes if world % (r * i) == 0]


class Probe:
    """The measurements of a world that was joined already."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._clock = clock_of(device.type)
        self._groups: dict[tuple[int, int], Collectives] = {}

    # -- time -------------------------------------------------------------------------------------------------------

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds until the slowest rank is done."""
        dist.barrier()
        start = self._clock.mark()
        work()
        return _slowest(self._clock.elapsed_s(start, self._clock.mark()))

    def repeated(self, work: Callable[[], Any]) -> Timing:
        """One call of ``work``, timed as often as time allows; the first call warms up."""
        self.timed(work)
        once_s = max(self.timed(work), 1e-6)
        calls = max(1, min(2000, round(_CALLS_S / once_s)))
        times = max(_LEAST, min(_MOST, int(_REPETITIONS_S / (calls * once_s))))

        def several() -> None:
            for _ in range(calls):
                work()

        seconds = [self.timed(several) / calls for _ in range(times)]
        return Timing(statistics.median(seconds), spread(seconds))

    # -- collectives --------------------------------------------------------------------------------------------------

    def collective(
        self, kind: Kind, payload_bytes: int, ranks: int, inner_ranks: int
    ) -> Callable[[], Pending]:
        """A function that starts a collective on its own tensors, over this rank's group at a position of an axis."""
        group = self._group(ranks, inner_ranks)
        numel = max(1, payload_bytes // (ranks * self.dtype.itemsize)) * ranks
        whole, part = (torch.zeros(n, dtype=self.dtype, device=self.device) for n in (numel, numel // ranks))
        if kind == "all_reduce":
            return lambda: group.all_reduce(whole, "z", "check")
        if kind == "all_gather":
            return lambda: group.all_gather(whole, part, "z", "check")
        return lambda: group.reduce_scatter(part, whole, "z", "check")

    def _group(self, ranks: int, inner_ranks: int) -> Collectives:
        """This rank's group of a position, as the z axis of a mesh of one axis; all groups are created at once."""
        key = (ranks, inner_ranks)
        if key not in self._groups:
            members = [
                [outer + inner + i * inner_ranks for i in range(ranks)]
                for outer in range(0, dist.get_world_size(), ranks * inner_ranks)
                for inner in range(inner_ranks)
            ]
            group, _ = dist.new_subgroups_by_enumeration(members)
            assert group is not None  # every rank is in one
            mesh = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("z",))
            self._groups[key] = Collectives(mesh, self.device.type)
        return self._groups[key]

    # -- operators ----------------------------------------------------------------------------------------------------

    def matmul(self, m: int, n: int, k: int) -> Callable[[], None]:
        """The three matmuls of one linear in training, forward and both gradients, each of this size."""
        left, right = self._noise(m, k), self._noise(k, n)
        right_t, left_t = self._noise(n, k), self._noise(k, m)

        def products() -> None:
            left @ right_t.T
            left @ right
            left_t.T @ right

        return products

    def attention(
        self, sequences: int, heads: int, length: int, head_dim: int
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """(forward, forward and backward) of causal attention."""
        q, k, v = (self._noise(sequences, heads, length, head_dim).requires_grad_() for _ in range(3))

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both() -> None:
            out = forward()
            torch.autograd.grad(out, (q, k, v), out.detach())

        return forward, both

    def elementwise(self, numel: int) -> Callable[[], Tensor]:
        """Reads two tensors and writes a third."""
        a, b = self._noise(numel), self._noise(numel)
        return lambda: a + b

    # -- both at once -------------------------------------------------------------------------------------------------

    def together(self, payload_bytes: int, ranks: int, inner_ranks: int) -> tuple[float, float]:
        """Slowdown of (computation, communication) while both run: `slow_downs` of three times."""
        start = self.collective("all_reduce", payload_bytes, ranks, inner_ranks)
        multiply = self.matmul(64, 64, 64)  # short, so that the end of a collective is seen soon
        one_s, once_s = self.repeated(lambda: start().wait()).median_s, self.repeated(multiply).median_s
        flights = max(4, math.ceil(_TOGETHER_S / one_s))
        products = max(1, round(flights * one_s / once_s))

        def communicate() -> None:
            for pending in [start() for _ in range(flights)]:
                pending.wait()

        def compute() -> None:
            for _ in range(products):
                multiply()

        def both() -> tuple[float, float]:
            dist.barrier()
            begin = self._clock.mark()
            under_way = [start() for _ in range(flights)]
            landed = None
            for _ in range(products):
                multiply()
                if landed is None and under_way[-1].is_done():
                    landed = self._clock.mark()
            computed = self._clock.mark()
            for pending in under_way:
                pending.wait()
            landed = landed or self._clock.mark()
            computed_s, landed_s = (self._clock.elapsed_s(begin, end) for end in (computed, landed))
            return _slowest(computed_s), _slowest(landed_s)

        communicate_s = statistics.median(self.timed(communicate) for _ in range(_LEAST))
        compute_s = statistics.median(self.timed(compute) for _ in range(_LEAST))
        found = [slow_downs(compute_s, communicate_s, *both()) for _ in range(_LEAST)]
        return statistics.median(c for c, _ in found), statistics.median(c for _, c in found)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)


def slow_downs(
    compute_s: float, communicate_s: float, computed_s: float, landed_s: float
) -> tuple[float, float]:
    """From the times alone, and when each was done when both began at once: how much longer each took while the other ran.

    The longer one runs alone for its rest.

    Example:
        >>> slow_downs(1.0, 2.0, 1.5, 2.5)  # 1.5 s together did 1 s of each; another second of communication alone
        (1.5, 1.5)
    """
    together_s = min(computed_s, landed_s)
    left_compute_s, left_communicate_s = computed_s - together_s, landed_s - together_s
    done_compute_s = max(compute_s - left_compute_s, 0.05 * compute_s)
    done_communicate_s = max(communicate_s - left_communicate_s, 0.05 * communicate_s)
    return max(1.0, together_s / done_compute_s), max(1.0, together_s / done_communicate_s)


def _slowest(value: float) -> float:
    """The largest value of all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)
