"""Measure the cluster that this runs on, in minutes, and write a cluster file that `fourfold plan` reads.

All ranks join one world and measure together: collectives by size on every position of an axis, matmuls by shape, and
both at once (`probe.py`). Rank 0 fits the parameters of the cost model (`fit.py`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fourfold.mesh.collectives import Pending
from fourfold.mesh.rendezvous import join_world, local_device
from fourfold.planner.calibrate.fit import Deviation, Parameter, collective_deviations, fit_links
from fourfold.planner.calibrate.probe import KINDS, Budget, Probe, Timing, positions
from fourfold.planner.inputs.cluster import LIBRARIES, Cluster, Device, Slowdown
from fourfold.planner.inputs.measured import CollectiveTimes, MatmulTime, Measured, Together, spread

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """What is measured. `sizes_for` has the defaults of each kind of device."""

    payload_bytes: tuple[int, ...]
    together_bytes: int
    matmul_sides: tuple[int, ...]
    elementwise_numel: int


def sizes_for(device_type: str) -> Sizes:
    if device_type == "cuda":
        return Sizes((2**12, 2**18, 2**22, 2**25, 2**28), 2**26, (256, 1024, 4096, 8192), 2**27)
    return Sizes((2**10, 2**14, 2**17, 2**20, 2**22), 2**20, (64, 256, 1024), 2**20)


@dataclass(frozen=True)
class Calibration:
    """A measured cluster, the spread of its parameters, and the deviation of the formulas from each measurement."""

    cluster: Cluster
    parameters: list[Parameter]
    deviations: list[Deviation]
    seconds: float


def calibrate(
    name: str, *, budget_s: float = 300.0, sizes: Sizes | None = None, say: Say | None = None
) -> Calibration | None:
    """Measure on all ranks (call it on each, under torchrun); rank 0 gets the result, the others None."""
    begin_s = time.monotonic()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world < 2:
        raise ValueError(
            f"a cluster of {world} rank has no links to measure; start with torchrun on at least 2 ranks"
        )
    device = local_device(None)
    sizes = sizes or sizes_for(device.type)

    def tell(what: str) -> None:
        if rank == 0:
            (say or _say)(f"[{time.monotonic() - begin_s:4.0f} s] {what}")

    join_world()
    try:
        budget = Budget.of(budget_s - (time.monotonic() - begin_s))
        measured, timings, parameters = _measure(Probe(device), sizes, budget, world, tell)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    if rank != 0:
        return None
    cluster, fitted = _fit(name, device, measured, timings)
    seconds = time.monotonic() - begin_s
    return Calibration(cluster, fitted + parameters, collective_deviations(cluster), seconds)


@dataclass(frozen=True)
class _Timings:
    """Timings that are not part of `Measured`."""

    elementwise: Timing
    moved_bytes: float
    launch: Timing


def _measure(
    probe: Probe, sizes: Sizes, budget: Budget, world: int, tell: Say
) -> tuple[Measured, _Timings, list[Parameter]]:
    tell("operators")
    elementwise = probe.repeated(probe.elementwise(sizes.elementwise_numel))
    launch = probe.repeated(probe.elementwise(1))
    matmuls = []
    sides = sizes.matmul_sides
    for m, n, k in ((m, n, k) for m in sides for n in sides for k in sides):
        timing = probe.repeated(probe.matmul(m, n, k))
        matmuls.append(MatmulTime(m, n, k, timing.median_s / 3, timing.spread_s / 3))
    # A head of 64 and a length that a step has; the rate hardly depends on them.
    forward, both = probe.attention(2, 8, 2 * max(64, sides[-1] // 8), 64)
    forward_s, both_s = probe.repeated(forward).median_s, probe.repeated(both).median_s
    flops = 4.0 * 2 * 8 * (2 * max(64, sides[-1] // 8)) ** 2 * 64

    together: list[Together] = []
    series: dict[tuple[str, int, int], list[tuple[int, Timing]]] = {}
    places = positions(world)
    for size in sizes.payload_bytes:
        for i, (ranks, inner) in enumerate(places):
            if (
                len(series) >= len(KINDS) * len(places)
                and size > sizes.payload_bytes[1]
                and budget.is_spent()
            ):
                tell(f"time is up: nothing above {size // 1024} KiB over {ranks} ranks, {inner} apart")
                break
            tell(
                f"collectives of {size / 1024:,.0f} KiB, position {i + 1} of {len(places)}: {ranks} ranks, {inner} apart"
            )
            for kind in KINDS:
                start = probe.collective(kind, size, ranks, inner)
                timing = probe.repeated(_waited_for(start))
                series.setdefault((kind, ranks, inner), []).append((size, timing))
    for ranks, inner in places:
        if together and budget.is_spent():
            break
        tell(f"both at once: {ranks} ranks, {inner} apart")
        together.append(Together(ranks, inner, *probe.together(sizes.together_bytes, ranks, inner)))
    collectives = tuple(
        CollectiveTimes(
            kind,
            ranks,
            inner,
            tuple(float(size) for size, _ in points),
            # Fewer bytes never take longer; where they do, something else disturbed the measurement.
            tuple(min(timing.median_s for _, timing in points[i:]) for i in range(len(points))),
            tuple(timing.spread_s for _, timing in points),
        )
        for (kind, ranks, inner), points in series.items()
    )
    measured = Measured(
        collectives=collectives,
        together=tuple(together),
        matmuls=tuple(matmuls),
        attention_forward_tflops=flops / forward_s / 1e12,
        attention_backward_tflops=2.5 * flops / max(both_s - forward_s, 0.1 * both_s) / 1e12,
    )
    parameters = [
        Parameter(
            f"slowdown.{way}",
            float(torch.tensor([getattr(t, way) for t in together]).median()),
            spread([getattr(t, way) for t in together]),
            "times as long while the other runs",
        )
        for way in ("compute", "communication")
    ]
    timings = _Timings(elementwise, 3.0 * sizes.elementwise_numel * probe.dtype.itemsize, launch)
    return measured, timings, parameters


def _fit(
    name: str, device: torch.device, measured: Measured, timings: _Timings
) -> tuple[Cluster, list[Parameter]]:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    links, library, parameters = fit_links(
        measured.collectives, local, LIBRARIES["nccl" if device.type == "cuda" else "gloo"]
    )
    best = max(measured.matmuls, key=lambda t: t.flops_per_s)
    moved_tbps = timings.moved_bytes / timings.elementwise.median_s / 1e12
    title, memory_gib, multiprocessors = _describe(device, local)
    fitted = Device(
        title,
        best_tflops=best.flops_per_s / 1e12,
        memory_gib=memory_gib,
        memory_tbps=moved_tbps,
        multiprocessors=multiprocessors,
        launch_us=timings.launch.median_s * 1e6,
        memory_share=1.0,
    )
    relative = timings.elementwise.spread_s / timings.elementwise.median_s
    parameters = [
        Parameter(
            "best_tflops", fitted.best_tflops, fitted.best_tflops * best.spread_s / best.seconds, "TFLOP/s"
        ),
        Parameter("memory_tbps", moved_tbps, moved_tbps * relative, "TB/s, element-wise"),
        Parameter(
            "launch_us", fitted.launch_us, timings.launch.spread_s * 1e6, "us, an operator on one element"
        ),
        *parameters,
    ]
    ways = [(t.compute, t.communication) for t in measured.together]
    middle = sorted(ways)[len(ways) // 2] if ways else (1.0, 1.0)
    cluster = Cluster(
        name,
        fitted,
        links,
        library,
        Slowdown(*middle),
        measured,
        source=f"fourfold calibrate on {os.environ['WORLD_SIZE']} ranks, {local} a node, {device.type}",
    )
    return cluster, parameters


def _describe(device: torch.device, local: int) -> tuple[str, float, int]:
    """(name, GiB of a rank, multiprocessors)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory / 2**30, properties.multi_processor_count
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "CPU", total_bytes / 2**30 / local, 1


def _waited_for(start: Callable[[], Pending]) -> Callable[[], None]:
    return lambda: start().wait()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
