"""Estimates from dry runs: the dry run of a layout, and its step simulated on a cluster."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from fourfold.mesh.axes import AXES, axis_of_mesh
from fourfold.optim.kinds import Optimizer
from fourfold.planner.cost.compute import operation_s
from fourfold.planner.cost.memory import Memory
from fourfold.planner.cost.step import Estimate, utilisation
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import FOURFOLD, Attention, Layout, Schedule
from fourfold.planner.inputs.workload import Workload, from_config

if TYPE_CHECKING:
    from fourfold.dry_run.events import Trace
    from fourfold.planner.simulate import Simulated


K = TypeVar("K")


@dataclass(frozen=True)
class Job:
    """A model and how it is trained, in all but the layout."""

    source: Any  # as `dryrun` takes it
    sequences: int
    length: int
    target: str
    precision: Any = "bf16"
    roles: Mapping[str, str] | None = None
    optimizer: Optimizer = "adamw"
    attention: Attention | None = None  # as `dryrun` takes it
    float8: Any = "none"
    lora_rank: int = 0
    quantization: Any = "none"
    expert_load: Any = 1.0


@dataclass(frozen=True)
class DryRunEstimate:
    """A layout's dry run: the events of one rank, and its memory."""

    layout: Layout
    traced: Trace
    left_out: int  # micro-batches like the second one (`dry_run/micro_batches.py`)

    @cached_property
    def trace(self) -> Trace:
        """The step with at most one of the micro-batches that were left out, which shows the memory of all."""
        return self.with_micro_batches(min(1, self.left_out))

    def with_micro_batches(self, repeated: int) -> Trace:
        from fourfold.dry_run.micro_batches import with_repeated

        return with_repeated(self.traced, repeated)


# -- models -----------------------------------------------------------------------------------------------------------


def describe(model: Any) -> tuple[Any, Workload | None]:
    """(the model as `dryrun` takes it, its workload); the workload is None for a module that is not from Hugging Face."""
    if isinstance(model, (str, Path)):
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        return path, from_config(path)
    if isinstance(model, dict):
        return model, from_config(model)
    if hasattr(model, "to_dict"):
        return model, from_config(model.to_dict())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return model, from_config(config.to_dict())
    if hasattr(model, "named_parameters"):
        return model, None
    raise ValueError(
        f"{type(model).__name__} is not a model; give a config.json's path, a Hugging Face configuration or an nn.Module"
    )


def _fresh(source: Any) -> Any:
    """A model that `dryrun` may modify: a copy of a module on meta, or a source to build one from."""
    if not hasattr(source, "named_parameters"):
        return source
    import torch
    from torch import nn

    def on_meta(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    return copy.deepcopy(source, {id(parameter): on_meta(parameter) for parameter in source.parameters()})


# -- dry runs ---------------------------------------------------------------------------------------------------------


def estimate_in_process(job: Job, layout: Layout) -> DryRunEstimate:
    from fourfold.dry_run.run import dryrun
    from fourfold.parallel.lora import Lora
    from fourfold.weights.overlap import Overlap

    done = dryrun(
        _fresh(job.source),
        layout.grid,
        sequences=job.sequences,
        length=job.length,
        micro_batches=layout.micro_batches,
        roles=job.roles,
        precision=job.precision,
        attention=job.attention,
        activations=layout.activations,
        activation_checkpointing=layout.activation_checkpointing,
        checkpointed_blocks=layout.checkpointed_blocks,
        weights=layout.weights,
        accumulation=layout.accumulation,
        overlap=Overlap(keep_bytes=layout.keep_bytes, keep_inputs=layout.keep_inputs),
        activation_offloading=layout.activation_offloading,
        sequence_ranks=layout.sequence_ranks,
        target=job.target,
        optimizer=job.optimizer,
        float8=job.float8,
        lora=Lora(job.lora_rank, quantization=job.quantization) if job.lora_rank else None,
        experts=layout.experts,
        expert_load=job.expert_load,
    )
    return DryRunEstimate(layout, done.traced, done.left_out)


def schedule_of(
    cluster: Cluster, precision: str, *, is_compiled: bool = False, float8: str = "none"
) -> Schedule:
    """Fourfold's overlap on these devices (`weights/overlap.py`), in that precision."""
    on_cpu = cluster.target == "cpu"
    return replace(
        FOURFOLD,
        weight_bytes=4 if precision == "fp32" else 2,
        interleaves=on_cpu and not is_compiled,
        elementwise="compiled" if is_compiled else "eager",
        float8=float8 != "none",
        fused_optimizer=not on_cpu,
        chunks_for=cluster.target,
    )


# -- simulation -------------------------------------------------------------------------------------------------------


def refuse_compiled(instead: str) -> NoReturn:
    """Simulations are over dry runs, which follow blocks operator by operator."""
    raise ValueError(f"a simulation follows blocks operator by operator, and these are compiled; {instead}")


def simulate_step(
    dry_run: DryRunEstimate, cluster: Cluster, *, keep_spans: bool = False
) -> tuple[Simulated, dict[str, float]]:
    """The predicted step, and its computation by part."""
    if keep_spans or dry_run.left_out < 2:
        return _simulate(dry_run, dry_run.left_out, cluster, keep_spans=keep_spans)
    # Each micro-batch in the middle takes as long as the one before it.
    (short, short_parts), (long, long_parts) = (_simulate(dry_run, n, cluster) for n in (0, 1))
    step = replace(
        short,
        step_s=_extrapolated(short.step_s, long.step_s, dry_run.left_out),
        compute_s=_extrapolated(short.compute_s, long.compute_s, dry_run.left_out),
        link_s=_extrapolated_all(short.link_s, long.link_s, dry_run.left_out),
        exposed_s=_extrapolated_all(short.exposed_s, long.exposed_s, dry_run.left_out),
    )
    return step, _extrapolated_all(short_parts, long_parts, dry_run.left_out)


def _extrapolated(short: float, long: float, times: int) -> float:
    return short + (long - short) * times


def _extrapolated_all(short: Mapping[K, float], long: Mapping[K, float], times: int) -> dict[K, float]:
    return {key: _extrapolated(short.get(key, 0.0), value, times) for key, value in long.items()}


def _simulate(
    dry_run: DryRunEstimate, repeated: int, cluster: Cluster, *, keep_spans: bool = False
) -> tuple[Simulated, dict[str, float]]:
    """The step with so many of the micro-batches that were left out."""
    from fourfold.dry_run.events import Operation
    from fourfold.dry_run.streams import on_streams
    from fourfold.planner.simulate import predict

    events, layout = dry_run.with_micro_batches(repeated).events, dry_run.layout
    different = {id(e): e for e in events if isinstance(e, Operation)}  # micro-batches share them
    seconds = {number: operation_s(event, cluster) for number, event in different.items()}
    if layout.weights == "fsdp2" and cluster.target == "cuda":
        events = on_streams(events)
    step = predict(events, layout.grid, cluster, keep_spans=keep_spans, seconds_of=lambda e: seconds[id(e)])
    alone_s = dict.fromkeys(("matmul", "attention", "element-wise", "recomputation", "optimizer"), 0.0)
    for event in events:
        if isinstance(event, Operation):
            part = _PART_OF_PHASE.get(event.phase) or _PART_OF_WORK[event.work]
            alone_s[part] += seconds[id(event)]
    # The slowdown by collectives in flight is distributed in proportion to the work.
    slower = step.compute_s / (sum(alone_s.values()) or 1.0)
    return step, {part: seconds * slower for part, seconds in alone_s.items()}


_PART_OF_PHASE = {"recompute": "recomputation", "clip": "optimizer", "optimizer": "optimizer"}
_PART_OF_WORK = {"matmul": "matmul", "attention": "attention", "memory": "element-wise"}


def _by_mesh_axis(seconds: Mapping[Any, float]) -> dict[str, float]:
    """Keys of shared sequences go over links of z, and so do rows of tokens that go to experts over z and x."""
    found = dict.fromkeys(reversed(AXES), 0.0)
    for track, value in seconds.items():
        if track != "host":
            found[axis_of_mesh(track)] += value
    return {str(axis): value for axis, value in found.items()}


def as_estimate(dry_run: DryRunEstimate, job: Job, workload: Workload | None, cluster: Cluster) -> Estimate:
    """A simulated step as an `Estimate`, like those of the formulas."""
    from fourfold.dry_run.events import CATEGORIES

    layout, peak, events = dry_run.layout, dry_run.trace.peak, dry_run.trace.events
    step, compute_s = simulate_step(dry_run, cluster)
    compute_s["host copies"] = step.exposed_s.get("host", 0.0)
    tokens = float(job.sequences) * job.length
    event = events[min(peak.event, len(events) - 1)]
    # The fields of a `Memory` are the categories, in order.
    held_bytes: list[Any] = [peak.by_category[category] for category in CATEGORIES]
    return Estimate(
        layout,
        step.step_s,
        compute_s,
        _by_mesh_axis(step.link_s),
        _by_mesh_axis(step.exposed_s),
        Memory(*held_bytes, f"{event.phase} of {event.module or 'the model'}"),  # type: ignore[call-arg]
        tokens / step.step_s,
        *utilisation(workload, layout, cluster.device, tokens, job.length, step.step_s),
        is_simulated=True,
    )
