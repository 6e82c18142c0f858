"""The layout of a run whose config sets no grid, as if the config had it.

With `grid.cluster` it is the planner's fastest one for the available ranks. Otherwise nothing is known of the machines, and
all ranks are on z (FSDP), with small micro-batches.

A restart on a different number of ranks gets a different layout with the same global batch. A restart on the same number of
ranks keeps the layout of the newest checkpoint, without waiting for the planner.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fourfold.checkpoint.commit import step_name, steps
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import CorruptCheckpointError
from fourfold.checkpoint.state import read_values
from fourfold.config.run_file import from_dict
from fourfold.config.schema import BY_MEMORY, CHOSEN_ALONG, RunConfig
from fourfold.mesh.axes import divisors
from fourfold.parallel.checkpointing import KINDS
from fourfold.planner.inputs.layout import ACCUMULATION, EXPERTS, ExpertsLayout, Layout

if TYPE_CHECKING:
    from fourfold.planner.cost.step import Estimate
    from fourfold.planner.search import Plan


MAX_IDLE = 64  # ranks that a layout may leave unused
# Where nothing is known of the devices: tokens of a micro-batch, unless a sequence is longer.
MICRO_BATCH_TOKENS = 8192
# What a layout is chosen for.
_INPUTS = attrgetter(
    "grid.cluster",
    "model",
    "sequences",
    "data.sequence_length",
    "engine.precision",
    "engine.attention",
    "engine.compile",
    "engine.activation_offloading",
    "engine.float8",
    "lora.rank",
    "lora.quantization",
    "lora.dropout",
    "optimizer.name",
)
_CHECKPOINTING = attrgetter("activation_checkpointing", "checkpointed_blocks")


def resume_or_choose_layout(run: RunConfig, ranks: int) -> RunConfig:
    """The run with a layout for these ranks, or for fewer if no layout uses all of them."""
    kept = layout_of_checkpoint(run, ranks)
    if kept is not None:
        return kept
    errors: list[ValueError] = []
    for used in range(ranks, max(0, ranks - MAX_IDLE - 1), -1):
        try:
            chosen = choose_layout(run, used)
            if errors:
                print(
                    f"fourfold: only {used} of {ranks} ranks train: {errors[0]}", file=sys.stderr, flush=True
                )
            return chosen
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def layout_of_checkpoint(run: RunConfig, ranks: int) -> RunConfig | None:
    """The run with the layout of its newest checkpoint, if that uses all ranks and agrees with the run config."""
    values = _newest_values(run)
    if values is None:
        return None
    try:
        before = from_dict(values["config"])
    except ValueError:  # of another version, or not of a run
        return None
    given = CHOSEN_ALONG & run.engine.model_fields_set
    # With one tensor rank activations are not sharded, whatever was configured.
    is_sharded = before.grid.x * before.grid.y > 1
    is_same = (
        before.grid.size == ranks
        and _INPUTS(before) == _INPUTS(run)
        and run.engine.weights in ("auto", before.engine.weights)
        and run.engine.experts in ("auto", before.engine.experts)
        and run.engine.accumulation in ("auto", before.engine.accumulation)
        and (
            run.engine.activation_checkpointing == "auto"
            or _CHECKPOINTING(run.engine) == _CHECKPOINTING(before.engine)
        )
        and (not is_sharded or run.engine.activations in ("auto", before.engine.activations))
        and run.batch.micro_batch_sequences in (None, before.batch.micro_batch_sequences)
        and run.batch.sequence_ranks in ("auto", before.batch.sequence_ranks)
        and all(
            getattr(run.engine, name) == getattr(before.engine, name)
            for name in given
            if is_sharded or name != "keep_inputs"
        )
    )
    if not is_same:
        return None
    names = (*CHOSEN_ALONG, *BY_MEMORY, "weights", "activations", "experts")
    chosen = {name: getattr(before.engine, name) for name in names}
    batch = {name: getattr(before.batch, name) for name in ("micro_batch_sequences", "sequence_ranks")}
    found = _with_sections(run, batch=batch, engine=chosen)
    return found.model_copy(update={"grid": before.grid})


def _newest_values(run: RunConfig) -> dict[str, Any] | None:
    """The values of the newest checkpoint that are not tensors."""
    root = open_folder(run.checkpoints.folder)
    found = steps(root) if run.checkpoints.resume else []
    try:
        return read_values(root.child(step_name(found[-1]))) if found else None
    except (CorruptCheckpointError, OSError):
        return None


def choose_layout(run: RunConfig, ranks: int) -> RunConfig:
    """The run with a layout for these ranks, by formulas alone. Options that the run config sets stay."""
    if run.grid.cluster is None:
        return all_on_z(run, ranks)
    from fourfold.planner.plan import plan
    from fourfold.train.loop.model import model_config

    found = plan(model_config(run.model), run.grid.cluster, ranks, **plan_options(run))
    return with_layout(run, fastest(run, found).layout)


def all_on_z(run: RunConfig, ranks: int) -> RunConfig:
    """The run with all ranks on z, which needs the least memory for weights of what is fast on most machines."""
    if run.sequences % ranks:
        length = run.data.sequence_length
        near = max(1, round(run.sequences / ranks)) * ranks * length
        raise ValueError(
            f"batch.tokens={run.batch.tokens} are {run.sequences} sequences, which do not divide over {ranks} ranks; use "
            f"{near}, another number of ranks, or set grid.x"
        )
    rows = run.batch.micro_batch_sequences
    if rows is None:
        most = max(1, MICRO_BATCH_TOKENS // run.data.sequence_length)
        rows = max(n for n in divisors(run.sequences // ranks) if n <= most)
    return _with_sections(
        run, grid={"data": 1, "z": ranks, "y": 1, "x": 1}, batch={"micro_batch_sequences": rows}
    )


def plan_options(run: RunConfig) -> dict[str, Any]:
    """The arguments of `fourfold.plan` by which it considers what the run config leaves open."""
    engine, checkpointing = run.engine, run.engine.activation_checkpointing
    return {
        "sequences": run.sequences,
        "length": run.data.sequence_length,
        "weights": engine.weights if engine.weights != "auto" else None,
        "precision": engine.precision,
        # Dropout of adapters is not compiled (`parallelize`).
        "compile": False if run.lora.dropout else engine.compile,
        "activation_offloading": engine.activation_offloading,
        "attention": engine.attention,
        "float8": engine.float8,
        "lora_rank": run.lora.rank,
        "quantization": run.lora.quantization,
        "sequence_ranks": run.batch.sequence_ranks,
        "optimizer": run.optimizer.name,
        "checkpointing": KINDS if checkpointing == "auto" else (checkpointing,),
        "checkpointed_blocks": engine.checkpointed_blocks,
        "accumulation": ACCUMULATION if engine.accumulation == "auto" else (engine.accumulation,),
        "keep_bytes": engine.keep_weights_bytes if _sets(run, "keep_weights_bytes") else None,
        "activations": engine.activations if engine.activations != "auto" else None,
        "keep_inputs": (engine.keep_inputs,) if _sets(run, "keep_inputs") else (True, False),
        "experts": _experts(run),
    }


def _experts(run: RunConfig) -> tuple[ExpertsLayout, ...]:
    """What the run config leaves open."""
    if run.engine.experts == "auto":
        return EXPERTS
    return (tuple(run.engine.experts) if isinstance(run.engine.experts, list) else run.engine.experts,)


def fastest(run: RunConfig, found: Plan) -> Estimate:
    """The fastest layout of a plan that agrees with the run config."""
    if not found.ranked:
        why = "; ".join(f"{r.layout}: {r.reason}" for r in found.rejected[:3])
        raise ValueError(
            f"no layout of {found.ranks} ranks can train this model on {run.grid.cluster}: {why}; use more ranks, or another "
            "batch.tokens"
        )
    rows = run.batch.micro_batch_sequences
    ranked = [
        estimate
        for estimate in found.ranked
        if rows is None or _micro_batch_rows(run, estimate.layout) == min(rows, _rows(run, estimate.layout))
    ]
    if not ranked:
        raise ValueError(
            f"no layout of {found.ranks} ranks that can train this model takes batch.micro_batch_sequences={rows}; leave it "
            f"out, or use {_micro_batch_rows(run, found.ranked[0].layout)}, which is the fastest"
        )
    return ranked[0]


def with_layout(run: RunConfig, layout: Layout) -> RunConfig:
    """The run with a layout's grid, micro-batches and engine; engine options that the run config sets stay."""
    return _with_sections(run, **layout_fields(run, layout))


def layout_fields(run: RunConfig, layout: Layout) -> dict[str, dict[str, Any]]:
    """The fields of a run config that say what a layout says, by their sections."""
    kept_bytes = run.engine.keep_weights_bytes
    return {
        "grid": {"data": layout.data, "z": layout.z, "y": layout.y, "x": layout.x},
        "batch": {
            "micro_batch_sequences": _micro_batch_rows(run, layout),
            "sequence_ranks": layout.sequence_ranks,
        },
        "engine": {
            "activations": layout.activations,
            "keep_inputs": layout.keep_inputs,
            "activation_checkpointing": layout.activation_checkpointing,
            "checkpointed_blocks": layout.checkpointed_blocks,
            "accumulation": layout.accumulation,
            "weights": layout.weights,
            "experts": run.engine.experts if layout.experts == "cut" else list(layout.experts),
            "keep_weights_bytes": kept_bytes if _sets(run, "keep_weights_bytes") else layout.keep_bytes,
        },
    }


def without_layout(run: RunConfig, keep: Sequence[str] = ()) -> RunConfig:
    """The run as if its config set neither a grid nor micro-batches: what a plan is made for.

    If it sets a grid, what is chosen along with one is left out as well, except the fields of [engine] to ``keep``.
    """
    values = run.model_dump(exclude_unset=True)
    values["grid"] = {"cluster": run.grid.cluster}
    batch = values.get("batch", {})
    batch.pop("micro_batch_sequences", None)
    if not run.grid.auto and run.sequence_ranks > 1:
        batch["sequence_ranks"] = "auto"
    if not run.grid.auto and "engine" in values:
        chosen = {*CHOSEN_ALONG, *BY_MEMORY, "activations", "experts"}.difference(keep)
        values["engine"] = {name: value for name, value in values["engine"].items() if name not in chosen}
    return from_dict(values)


def _with_sections(run: RunConfig, **changes: dict[str, Any]) -> RunConfig:
    sections = {name: getattr(run, name).model_copy(update=fields) for name, fields in changes.items()}
    return run.model_copy(update=sections)


def _sets(run: RunConfig, field: str) -> bool:
    return field in run.engine.model_fields_set


def _micro_batch_rows(run: RunConfig, layout: Layout) -> int:
    return _rows(run, layout) // layout.micro_batches


def _rows(run: RunConfig, layout: Layout) -> int:
    """The sequences that a rank has, or has a part of."""
    return run.sequences * layout.sequence_ranks // (layout.data * layout.z)
