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
from itertools import product
from statistics import median_low

import torch
import torch.distributed as dist

from fourfold.mesh.collectives import Pending
from fourfold.mesh.rendezvous import join_world, local_device
from fourfold.planner.calibrate.fit import Deviation, Parameter, collective_deviations, fit_links
from fourfold.planner.calibrate.probe import KINDS, Probe, Timing, is_past, positions
from fourfold.planner.inputs.cluster import LIBRARIES, Cluster, Device, Slowdown
from fourfold.planner.inputs.measured import CollectiveTimes, MatmulTime, Measured, Together, spread


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


def calibrate(name: str, *, budget_s: float = 300.0, sizes: Sizes | None = None) -> Calibration | None:
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
            print(f"[{time.monotonic() - begin_s:4.0f} s] {what}", file=sys.stderr, flush=True)

    join_world()
    try:
        measured, elementwise, launch = _measure(Probe(device), sizes, begin_s + budget_s, world, tell)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    if rank != 0:
        return None
    cluster, parameters = _fit(name, device, measured, elementwise, launch)
    seconds = time.monotonic() - begin_s
    return Calibration(cluster, parameters, collective_deviations(cluster), seconds)


def _measure(
    probe: Probe, sizes: Sizes, deadline_s: float, world: int, tell: Callable[[str], None]
) -> tuple[Measured, Timing, Timing]:
    """(what a plan uses; an element-wise operator, for each terabyte that it moves; one on a single element)."""
    tell("operators")
    elementwise = probe.repeated(probe.elementwise(sizes.elementwise_numel))
    moved_tb = 3.0 * sizes.elementwise_numel * probe.dtype.itemsize / 1e12
    launch = probe.repeated(probe.elementwise(1))
    matmuls = []
    sides = sizes.matmul_sides
    for m, n, k in product(sides, repeat=3):
        timing = probe.repeated(probe.matmul(m, n, k))
        matmuls.append(MatmulTime(m, n, k, timing.median_s / 3, timing.spread_s / 3))
    # A head of 64 and a length that a step has; the rate hardly depends on them.
    sequences, heads, length, head_dim = 2, 8, 2 * max(64, sides[-1] // 8), 64
    forward, both = probe.attention(sequences, heads, length, head_dim)
    forward_s, both_s = probe.repeated(forward).median_s, probe.repeated(both).median_s
    flops = 4.0 * sequences * heads * length**2 * head_dim

    together: list[Together] = []
    series: dict[tuple[str, int, int], list[tuple[int, Timing]]] = {}
    places = positions(world)
    for size in sizes.payload_bytes:
        for i, (ranks, inner) in enumerate(places):
            has_two_sizes = len(series) >= len(KINDS) * len(places) and size > sizes.payload_bytes[1]
            if has_two_sizes and is_past(deadline_s):
                tell(f"time is up: nothing above {size // 1024} KiB over {ranks} ranks, {inner} apart")
                break
            tell(
                f"collectives of {size / 1024:,.0f} KiB, position {i + 1} of {len(places)}: {ranks} ranks, {inner} apart"
            )
            for kind in KINDS:
                timing = probe.repeated(_waited_for(probe.collective(kind, size, ranks, inner)))
                series.setdefault((kind, ranks, inner), []).append((size, timing))
    for ranks, inner in places:
        if together and is_past(deadline_s):
            break
        tell(f"both at once: {ranks} ranks, {inner} apart")
        together.append(Together(ranks, inner, *probe.together(sizes.together_bytes, ranks, inner)))
    collectives = tuple(
        CollectiveTimes(
            *place,
            tuple(float(size) for size, _ in points),
            # Fewer bytes never take longer; where they do, something else disturbed the measurement.
            tuple(min(timing.median_s for _, timing in points[i:]) for i in range(len(points))),
            tuple(timing.spread_s for _, timing in points),
        )
        for place, points in series.items()
    )
    measured = Measured(
        collectives=collectives,
        together=tuple(together),
        matmuls=tuple(matmuls),
        attention_forward_tflops=flops / forward_s / 1e12,
        attention_backward_tflops=2.5 * flops / max(both_s - forward_s, 0.1 * both_s) / 1e12,
    )
    return measured, Timing(*(seconds / moved_tb for seconds in elementwise)), launch


def _fit(
    name: str, device: torch.device, measured: Measured, elementwise: Timing, launch: Timing
) -> tuple[Cluster, list[Parameter]]:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    links, library, of_links = fit_links(
        measured.collectives, local, LIBRARIES["nccl" if device.type == "cuda" else "gloo"]
    )
    best = max(measured.matmuls, key=lambda t: t.flops_per_s)
    best_tflops, memory_tbps = best.flops_per_s / 1e12, 1 / elementwise.median_s
    launch_us = launch.median_s * 1e6
    title, memory_gib, multiprocessors = _describe(device, local)
    fitted = Device(
        title,
        best_tflops=best_tflops,
        memory_gib=memory_gib,
        memory_tbps=memory_tbps,
        multiprocessors=multiprocessors,
        launch_us=launch_us,
        memory_share=1.0,
    )
    ways = [(t.compute, t.communication) for t in measured.together]
    relative = elementwise.spread_s / elementwise.median_s
    parameters = [
        Parameter("best_tflops", best_tflops, best_tflops * best.spread_s / best.seconds, "TFLOP/s"),
        Parameter("memory_tbps", memory_tbps, memory_tbps * relative, "TB/s, element-wise"),
        Parameter("launch_us", launch_us, launch.spread_s * 1e6, "us, an operator on one element"),
        *of_links,
        *(
            Parameter(
                f"slowdown.{way}", median_low(factors), spread(factors), "times as long while the other runs"
            )
            for way, factors in zip(("compute", "communication"), zip(*ways, strict=True), strict=True)
        ),
    ]
    cluster = Cluster(
        name,
        fitted,
        links,
        library,
        Slowdown(*sorted(ways)[len(ways) // 2]),
        measured,
        source=f"fourfold calibrate on {os.environ['WORLD_SIZE']} ranks, {local} a node, {device.type}",
        assumed=(
            *(p.name for p in of_links if not p.is_measured),
            *(("host_gbps, of PCIe 4.0",) if device.type == "cuda" else ()),
        ),
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
