"""`fourfold.plan`: rank all layouts by formulas, then simulate the best of them over their dry runs.

Formulas are fast and know families of models. A dry run is the code that trains; it knows any model and takes seconds for
each layout. So formulas select the candidates, and the simulation ranks those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from fourfold.mesh.axes import divisors, factorisations
from fourfold.planner.cost.compute import Kernels
from fourfold.planner.cost.optimizer import Optimizer
from fourfold.planner.cost.step import Estimate
from fourfold.planner.dry_run_estimate import (
    DryRunEstimate,
    Job,
    as_estimate,
    describe,
    precision_of,
    schedule_of,
    target_of,
)
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import Activations, Layout
from fourfold.planner.inputs.workload import Workload
from fourfold.planner.search import RESERVE, Plan, Rejected, memory_limit_bytes, search, too_large
from fourfold.planner.workers import estimate_all, estimate_by_dry_run


def plan(
    model: Any,
    cluster: str | Path | Cluster,
    ranks: int,
    *,
    sequences: int,
    length: int,
    simulate: int = 20,
    weights: Literal["fsdp2", "streamed"] | None = None,
    precision: Literal["bf16", "fp32"] | None = None,
    optimizer: Optimizer = "adamw",
    checkpointing: tuple[Literal["none", "full"], ...] = ("none", "full"),
    activations: Activations | None = None,
    keep_inputs: tuple[bool, ...] = (True, False),
    reserve: float = RESERVE,
    kernels: Kernels | None = None,
    roles: Mapping[str, str] | None = None,
    dry_runs: int = 100,
    quiet: bool = False,
) -> Plan:
    """Rank the layouts of a model on N ranks of a cluster. All values are predictions.

    ``model`` is the path of a Hugging Face ``config.json``, a configuration, or a module; ``cluster`` a preset's
    name, the path of a TOML file, or a `Cluster`. The global batch is ``sequences`` of ``length`` tokens. The formulas rank
    all; the first ``simulate`` are then simulated over their dry runs, whose memory replaces that of the formulas, and ranked
    by that. ``weights`` and ``precision`` are FSDP2 and bf16 on GPUs, streamed and fp32 on CPUs, unless given;
    ``optimizer`` is that of the run. Replicated and token-sharded ``activations`` are both tried, unless one is given; the
    latter with gathered inputs that are kept and that are gathered again, unless ``keep_inputs`` says which.

    Any other module that takes ``input_ids`` and ``labels`` and returns the ``.loss`` of its ``loss_function`` has no formulas:
    every grid of it that divides is dry-run, at most ``dry_runs`` layouts, with ``roles`` as `parallelize` takes them.

    Example:
        >>> found = plan(config, "dgx-h100", 16, sequences=32, length=64, simulate=2, quiet=True)
        >>> found.best.is_simulated and found.best.layout.ranks == 16
        True
    """
    machines = cluster if isinstance(cluster, Cluster) else clusters.load(cluster)
    source, workload = describe(model)
    weights = weights or ("fsdp2" if target_of(machines) == "cuda" else "streamed")
    work = precision or precision_of(machines)
    job = Job(source, sequences, length, target_of(machines), work, roles, optimizer)
    given = _Given(job, workload, machines, kernels, reserve, quiet)
    if workload is None:
        # Few such modules allow token sharding, and each try is a dry run.
        return _without_formulas(given, ranks, weights, checkpointing, activations or "replicated", dry_runs)
    found = search(
        workload,
        machines,
        ranks,
        sequences,
        length,
        schedule=schedule_of(machines, work),
        kernels=kernels,
        optimizer=optimizer,
        weights=weights,
        checkpointing=checkpointing,
        activations=(activations,) if activations else ("replicated", "token-sharded"),
        keep_inputs=keep_inputs,
        reserve=reserve,
    )
    first = _worth_simulating(found, simulate)
    rest = [e for e in found.ranked if e not in first]
    simulated, failed = _simulate(given, [e.layout for e in first], {e.layout: e.step_s for e in first})
    return replace(found, ranked=[*simulated, *rest], rejected=[*found.rejected, *failed])


def _worth_simulating(found: Plan, count: int) -> list[Estimate]:
    """The first ones, and the first with and without y and token sharding, so that simulations can be compared."""
    if not count:
        return []
    first = found.ranked[:count]
    seen = {(trait, has) for e in first for trait, has in _traits(e)}
    for e in found.ranked:
        if not seen.issuperset(_traits(e)):
            first.append(e)
            seen.update(_traits(e))
    return first


def _traits(estimate: Estimate) -> list[tuple[str, bool]]:
    return [("y", estimate.layout.y > 1), ("by tokens", estimate.layout.by_tokens)]


@dataclass(frozen=True)
class _Given:
    job: Job
    workload: Workload | None
    cluster: Cluster
    kernels: Kernels | None
    reserve: float
    quiet: bool


def _simulate(
    given: _Given, layouts: list[Layout], formulas_s: dict[Layout, float]
) -> tuple[list[Estimate], list[Rejected]]:
    """(the layouts that run and fit, the fastest first; the others with the reason)."""
    g = given
    ranked: list[Estimate] = []
    rejected: list[Rejected] = []
    for layout, dry_run in _dry_runs(g, layouts):
        if isinstance(dry_run, ValueError):
            rejected.append(Rejected(layout, f"the dry run: {dry_run}"))
            continue
        over = too_large(layout, dry_run.peak.bytes, g.cluster, g.reserve, ", by the dry run")
        if over is not None:
            rejected.append(over)
            continue
        formula_s = formulas_s.get(layout)
        ranked.append(as_estimate(dry_run, g.job, g.workload, g.cluster, g.kernels, formula_s))
    ranked.sort(key=lambda e: e.step_s)
    return ranked, rejected


def _without_formulas(
    given: _Given,
    ranks: int,
    weights: Literal["fsdp2", "streamed"],
    checkpointing: tuple[Literal["none", "full"], ...],
    activations: Activations,
    dry_runs: int,
) -> Plan:
    """Every grid whose data and z divide the batch, few tensor ranks first, each with one micro-batch and as many as fit."""
    layouts: list[Layout] = []
    rejected: list[Rejected] = []
    sequences = given.job.sequences
    grids = sorted(factorisations(ranks), key=lambda grid: (grid[2] * grid[3], grid[2], -grid[1]))
    for data, z, y, x in grids:
        if sequences % (data * z):
            reason = f"data*z={data * z} does not divide the global batch of {sequences}"
            rejected.append(Rejected(Layout(data, z, y, x, weights=weights), reason))
            continue
        kind = activations if x * y > 1 else "replicated"
        for micro_batches, recompute in product(divisors(sequences // (data * z)), checkpointing):
            layouts.append(Layout(data, z, y, x, micro_batches, recompute, 0, weights, kind))
    name = type(given.job.source).__name__
    notes = [f"{name} has no formulas: each of its layouts was dry-run and simulated."]
    left = layouts[dry_runs:]
    if left:
        notes.append(
            f"{len(left)} of {len(layouts)} layouts were not tried (more tensor ranks come last); give more dry_runs."
        )
    ranked, failed = _simulate(given, layouts[:dry_runs], {})
    limit_bytes = memory_limit_bytes(given.cluster, given.reserve)
    considered = len(rejected) + min(dry_runs, len(layouts))
    return Plan(ranked, [*rejected, *failed], considered, ranks, limit_bytes, tuple(notes))


def _dry_runs(given: _Given, layouts: list[Layout]) -> Iterator[tuple[Layout, DryRunEstimate | ValueError]]:
    """Each layout with its dry run, or its error; several run in parallel, with a progress bar."""
    done: Iterator[DryRunEstimate | ValueError]
    if len(layouts) < _WORTH_PROCESSES:
        done = (_dry_run_one(given.job, layout) for layout in layouts)
    else:
        done = estimate_all(given.job, layouts)
    shown: Iterable[DryRunEstimate | ValueError] = done
    if not given.quiet and layouts:
        console = Console(file=sys.stderr)
        shown = track(done, "dry run and simulation", len(layouts), console=console, transient=True)
    yield from zip(layouts, shown, strict=True)


_WORTH_PROCESSES = 8  # layouts; a process needs seconds to import torch


def _dry_run_one(job: Job, layout: Layout) -> DryRunEstimate | ValueError:
    try:
        return estimate_by_dry_run(job, layout)
    except ValueError as error:
        return error
