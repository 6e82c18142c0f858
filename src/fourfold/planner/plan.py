"""`fourfold.plan`: rank all layouts by formulas, then simulate the best of them over their dry runs.

Formulas are fast and know families of models. A dry run is the code that trains; it knows any model and takes seconds for
each layout. So formulas select the candidates, and the simulation ranks those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from fourfold.mesh.axes import divisors, factorisations
from fourfold.optim.kinds import Optimizer
from fourfold.parallel.checkpointing import KINDS, ActivationCheckpointing
from fourfold.planner.cost.float8 import check_float8
from fourfold.planner.cost.step import Estimate, Prices
from fourfold.planner.dry_run_estimate import Job, describe, refuse_compiled, schedule_of
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import (
    ACCUMULATION,
    EXPERTS,
    Accumulation,
    Activations,
    Attention,
    ExpertsLayout,
    Layout,
)
from fourfold.planner.inputs.workload import Workload
from fourfold.planner.search import RESERVE, Plan, Rejected, memory_limit_bytes, search, too_large
from fourfold.planner.workers import for_all, simulate_layout
from fourfold.weights.quantization import Quantization


def plan(
    model: Any,
    cluster: str | Path | Cluster,
    ranks: int,
    *,
    sequences: int,
    length: int,
    simulate: int = 0,
    weights: Literal["fsdp2", "streamed"] | None = None,
    precision: Literal["bf16", "fp32"] | None = None,
    optimizer: Optimizer = "adamw",
    compile: bool | None = None,
    float8: Literal["none", "rowwise_with_gw_hp"] = "none",
    checkpointing: tuple[ActivationCheckpointing, ...] = KINDS,
    checkpointed_blocks: int | None = None,
    activations: Activations | None = None,
    keep_inputs: tuple[bool, ...] = (True, False),
    keep_bytes: int | None = None,
    accumulation: tuple[Accumulation, ...] = ACCUMULATION,
    activation_offloading: bool = False,
    attention: Attention = "auto",
    reserve: float = RESERVE,
    lora_rank: int = 0,
    quantization: Quantization = "none",
    experts: tuple[ExpertsLayout, ...] = EXPERTS,
    expert_load: float | Literal["worst"] = 1.0,
    sequence_ranks: int | Literal["auto"] = 1,
    roles: Mapping[str, str] | None = None,
    dry_runs: int = 100,
    quiet: bool = False,
) -> Plan:
    """Rank the layouts of a model on N ranks of a cluster. All values are predictions.

    ``model`` is the path of a Hugging Face ``config.json``, a configuration, or a module; ``cluster`` a preset's
    name, the path of a TOML file, or a `Cluster`. The global batch is ``sequences`` of ``length`` tokens. The formulas rank
    all; the first ``simulate`` are then simulated over their dry runs, whose memory replaces that of the formulas, and ranked
    by that. ``weights`` and ``precision`` are FSDP2 and bf16 on GPUs, streamed and fp32 on CPUs, unless given;
    ``optimizer`` is that of the run. With ``compile``, which is what GPUs do, element-wise work is that of compiled blocks; a dry run does not
    follow those, so that they have formulas alone, and None does not compile what is to be simulated. ``float8`` is that of the run; it needs
    devices whose rate in it is published. Replicated and sequence-parallel ``activations`` are both tried, unless one is given; the
    latter with gathered inputs that are kept and that are gathered again, unless ``keep_inputs`` says which. With
    ``activation_offloading`` the inputs of blocks that are recomputed are on the host, where a layout recomputes any. ``attention`` is that
    of packed documents, as in a run config. With a ``lora_rank`` adapters of all linears but the head are trained, and the weights frozen,
    with a ``quantization`` of those in blocks. ``experts`` of a mixture are gathered over z, and owned by its ranks, unless one is given;
    ``expert_load`` is how many rows the fullest owner has, as a multiple of the mean, or "worst".
    with a ``quantization`` of those in blocks. ``sequence_ranks`` neighbours along z share sequences; "auto": where that lets the batch
    divide, or makes micro-batches smaller.

    Any other module that takes ``input_ids``, ``labels`` and ``**kwargs`` of its loss and returns the ``.loss`` of its ``loss_function`` has no formulas:
    every grid of it that divides is dry-run, at most ``dry_runs`` layouts, with ``roles`` as `parallelize` takes them and the
    first of ``keep_inputs`` and ``accumulation``.

    Example:
        >>> found = plan(config, "dgx-h100", 16, sequences=32, length=64, simulate=2, quiet=True)
        >>> found.best.is_simulated and found.best.layout.ranks == 16
        True
    """
    machines = cluster if isinstance(cluster, Cluster) else clusters.load(cluster)
    source, workload = describe(model)
    weights = weights or ("fsdp2" if machines.target == "cuda" else "streamed")
    is_simulated = bool(simulate) or workload is None
    asks_for_compiled = bool(compile)
    if quantization != "none":
        if compile:
            raise ValueError(f"blocks with quantization={quantization!r} are not compiled; use compile=False")
        compile = False
    if compile is None:
        compile = machines.target == "cuda" and not is_simulated
    if compile and is_simulated:
        how = "simulate=0" if workload is not None else "a model of Hugging Face, which has formulas"
        refuse_compiled(f"use {how}, or compile=False")
    offloads = activation_offloading and machines.target == "cuda"
    work = precision or machines.precision
    if float8 != "none":
        _ = machines.device.best_float8_tflops  # refuses devices without one
        if workload is not None:
            check_float8(workload)
    if sequence_ranks != 1:
        _check_shared(workload, machines.target, work, offloads=offloads, float8=float8, asked=sequence_ranks)
    workload = workload and workload.attended(attention, machines.target, work).adapted(
        lora_rank, quantization
    )
    of_dry_run: Attention | None = "flex" if workload is not None and workload.is_flex else None
    job = Job(
        source,
        sequences,
        length,
        machines.target,
        work,
        roles,
        optimizer,
        of_dry_run,
        float8,
        lora_rank,
        quantization,
        expert_load,
    )
    if workload is not None and workload.experts is not None:
        experts = _possible_experts(
            workload,
            experts,
            optimizer,
            lora_rank,
            {
                "compile=True": asks_for_compiled,
                "activation_offloading": offloads,
                f"float8={float8!r}": float8 != "none",
            },
        )
    if workload is None:
        # Few such modules allow sequence parallelism, and each try is a dry run.
        layouts, rejected = _all_layouts(
            ranks,
            sequences,
            checkpointing,
            Layout(
                *(1, 1, 1, 1),
                keep_bytes=keep_bytes or 0,
                weights=weights,
                activations=activations or "replicated",
                keep_inputs=keep_inputs[0],
                checkpointed_blocks=checkpointed_blocks,
                accumulation=accumulation[0],
                activation_offloading=offloads,
            ),
        )
        notes = [f"{type(source).__name__} has no formulas: each of its layouts was dry-run and simulated."]
        if left := layouts[dry_runs:]:
            notes.append(
                f"{len(left)} of {len(layouts)} layouts were not tried (more tensor ranks come last); give more dry_runs."
            )
        layouts = layouts[:dry_runs]
        found = Plan([], rejected, ranks, memory_limit_bytes(machines, reserve), tuple(notes))
    else:
        prices = Prices(
            workload,
            machines,
            length,
            schedule_of(machines, work, is_compiled=compile, float8=float8),
            optimizer=optimizer,
            expert_load=expert_load,
        )
        found = search(
            prices,
            ranks,
            sequences,
            weights=weights,
            checkpointing=checkpointing,
            checkpointed_blocks=checkpointed_blocks,
            activations=(activations,) if activations else ("replicated", "sequence-parallel"),
            keep_inputs=keep_inputs,
            keep_bytes=keep_bytes,
            accumulation=accumulation,
            activation_offloading=offloads,
            experts=experts,
            sequence_ranks=sequence_ranks,
            reserve=reserve,
        )
        if workload.experts is not None:
            notes_of_experts = tuple(_notes_of_experts(found, prices, sequences))
            found = replace(found, notes=(*found.notes, *notes_of_experts))
        layouts = [e.layout for e in _worth_simulating(found, simulate)]
    formulas_s = {e.layout: e.step_s for e in found.ranked}
    simulated: list[Estimate] = []
    failed: list[Rejected] = []
    tried: Iterable[Estimate | ValueError] = for_all(
        partial(simulate_layout, job, workload, machines), layouts
    )
    if layouts and not quiet:
        console = Console(file=sys.stderr)
        tried = track(tried, "dry run and simulation", len(layouts), console=console, transient=True)
    for layout, found_out in zip(layouts, tried, strict=True):
        if isinstance(found_out, ValueError):
            failed.append(Rejected(layout, f"the dry run: {found_out}"))
        elif over := too_large(layout, found_out.memory.total_bytes, machines, reserve, ", by the dry run"):
            failed.append(over)
        else:
            simulated.append(replace(found_out, formula_s=formulas_s.get(layout)))
    if activation_offloading and not offloads:
        found = replace(
            found, notes=(*found.notes, "activation_offloading has no effect on CPUs; leave it out.")
        )
    simulated.sort(key=lambda e: e.step_s)
    rest = [e for e in found.ranked if e.layout not in layouts]
    notes = list(found.notes)
    if machines.target == "cuda":
        state = "compiled" if compile else "not compiled"
        others = ", but where ranks own experts" if compile and workload and workload.experts else ""
        notes.append(f"Blocks are {state} (engine.compile){others}.")
        if compile and any(e.layout.sequence_ranks > 1 for e in found.ranked):
            notes.append("Blocks of shared sequences are not compiled.")
    if float8 != "none":
        notes.append(
            f"Linears of blocks compute in float8 ({float8}); MFU and HFU are parts of the peak in bf16."
        )
    if lora_rank:
        of_weights = "" if quantization == "none" else ", the weights of blocks in NF4"
        notes.append(
            f"LoRA of rank {lora_rank} in all linears but the head{of_weights}; MFU and HFU count two of three products of frozen weights."
        )
    return replace(found, ranked=[*simulated, *rest], rejected=[*found.rejected, *failed], notes=tuple(notes))


def _possible_experts(
    workload: Workload,
    experts: tuple[ExpertsLayout, ...],
    optimizer: Optimizer,
    lora_rank: int,
    others: Mapping[str, bool],
) -> tuple[ExpertsLayout, ...]:
    """Of these, what `parallelize` allows with the ``others`` that are on."""
    if optimizer == "muon" or lora_rank:
        what = f"optimizer={optimizer!r}" if optimizer == "muon" else f"lora_rank={lora_rank}"
        raise ValueError(
            f"{workload.name} has experts, and the planner's formulas do not know {what} with them; follow a step with `fourfold dryrun`"
        )
    on = [name for name, is_on in others.items() if is_on]
    if not on:
        return experts
    if "cut" not in experts:
        raise ValueError(f"experts that ranks own with {on[0]} are not supported; use experts=('cut',)")
    return ("cut",)


def _notes_of_experts(found: Plan, prices: Prices, sequences: int) -> list[str]:
    """What owned experts gain over gathered ones, and how uneven routers may be."""
    owned = next((e for e in found.ranked if e.layout.experts != "cut"), None)
    gathered = next((e for e in found.ranked if e.layout.experts == "cut"), None)
    notes = []
    if owned is not None and gathered is not None:
        first, second = sorted((owned, gathered), key=lambda e: e.step_s)
        words = {True: "gathered over z", False: "owned"}
        is_cut = first.layout.experts == "cut"
        notes.append(
            f"Experts {words[is_cut]} are {second.step_s / first.step_s:.2f} times as fast as {words[not is_cut]}: the best of those is "
            f"{second.layout}, limited by {second.limited_by}."
        )
    if owned is not None:
        load = fitting_load(prices, owned.layout, sequences, found.memory_limit_bytes)
        most = "as many rows as routers can send" if load is None else f"{load:.1f} times the mean rows"
        notes.append(f"With owned experts ({owned.layout}) a rank has memory for {most}.")
    return notes


def fitting_load(prices: Prices, layout: Layout, sequences: int, limit_bytes: float) -> float | None:
    """The load of the fullest owner at which the memory is used up; None if there is none."""
    tokens = prices.tokens_at_once(layout, sequences)

    def fits(load: float | Literal["worst"]) -> bool:
        return replace(prices, expert_load=load).memory(layout, tokens).total_bytes <= limit_bytes

    if fits("worst"):
        return None
    low, high = 1.0, float(prices.workload.experts.number if prices.workload.experts else 1)
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_shared(
    workload: Workload | None,
    target: str,
    precision: str,
    *,
    offloads: bool,
    float8: str,
    asked: int | str,
) -> None:
    """Reject what the formulas of shared sequences, or the engine, do not know."""
    for is_given, what, way_out in (
        (workload is None, "a module without formulas", "follow it with ff.dryrun"),
        (
            target != "cuda" or precision != "bf16",
            f"{precision} on {target}",
            "use bf16 on GPUs, where attention has a kernel",
        ),
        (offloads, "activation_offloading", "leave one of the two out"),
        (float8 != "none", f"float8={float8!r}", "leave one of the two out"),
    ):
        if is_given:
            raise ValueError(f"sequence_ranks={asked!r} with {what} cannot be planned; {way_out}")
    if workload is not None and workload.not_shared and asked != "auto":
        raise ValueError(
            f"sequence_ranks={asked!r} cannot be planned: {workload.not_shared}; use sequence_ranks=1"
        )


def _worth_simulating(found: Plan, count: int) -> list[Estimate]:
    """The first ones, and the first with and without y and sequence parallelism, so that simulations can be compared."""
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


def _all_layouts(
    ranks: int,
    sequences: int,
    checkpointing: tuple[ActivationCheckpointing, ...],
    given: Layout,
) -> tuple[list[Layout], list[Rejected]]:
    """Every grid whose data and z divide the batch, few tensor ranks first, each with one micro-batch and as many as fit; the rest is ``given``."""
    layouts: list[Layout] = []
    rejected: list[Rejected] = []
    grids = sorted(factorisations(ranks), key=lambda grid: (grid[2] * grid[3], grid[2], -grid[1]))
    for data, z, y, x in grids:
        layout = replace(given, data=data, z=z, y=y, x=x)
        if sequences % (data * z):
            reason = f"data*z={data * z} does not divide the global batch of {sequences}"
            rejected.append(Rejected(layout, reason))
            continue
        if x * y == 1:
            layout = replace(layout, activations="replicated")
        layouts += [
            replace(layout, micro_batches=micro_batches, activation_checkpointing=recompute)
            for micro_batches, recompute in product(divisors(sequences // (data * z)), checkpointing)
        ]
    return layouts, rejected
