"""`grid.auto`: the planner's fastest layout for the available ranks, as if the run config had it.

A restart on a different number of ranks gets a different layout with the same global batch. A restart on the same number of
ranks keeps the layout of the newest checkpoint, without waiting for the planner.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fourfold.checkpoint.commit import step_name, steps
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import CorruptCheckpointError
from fourfold.checkpoint.state import read_values
from fourfold.config.run_file import from_dict
from fourfold.config.schema import CHOSEN_ALONG, RunConfig

if TYPE_CHECKING:
    from fourfold.planner.inputs.layout import Layout


MAX_IDLE = 64  # ranks that a layout may leave unused
# What a layout is chosen for.
_INPUTS = attrgetter(
    "grid.cluster", "model", "sequences", "data.sequence_length", "engine.precision", "optimizer.name"
)


def resume_or_choose_layout(
    run: RunConfig, ranks: int, *, simulate: int = 8, quiet: bool = False
) -> RunConfig:
    """The run with a layout for these ranks, or for fewer if no layout uses all of them."""
    kept = layout_of_checkpoint(run, ranks)
    if kept is not None:
        return kept
    # In a restart ranks wait: choose by formulas alone then, in less than a second.
    simulate = 0 if _newest_values(run) is not None else simulate
    errors: list[ValueError] = []
    for used in range(ranks, max(0, ranks - MAX_IDLE - 1), -1):
        try:
            return choose_layout(run, used, simulate=simulate, quiet=quiet)
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
        and (not is_sharded or run.engine.activations in ("auto", before.engine.activations))
        and run.batch.micro_batch_sequences in (None, before.batch.micro_batch_sequences)
        and all(
            getattr(run.engine, name) == getattr(before.engine, name)
            for name in given
            if is_sharded or name != "keep_inputs"
        )
    )
    if not is_same:
        return None
    sections = {
        "grid": before.grid,
        "engine": before.engine,
        "batch": run.batch.model_copy(update={"micro_batch_sequences": before.batch.micro_batch_sequences}),
    }
    return run.model_copy(update=sections)


def _newest_values(run: RunConfig) -> dict[str, Any] | None:
    """The values of the newest checkpoint that are not tensors."""
    root = open_folder(run.checkpoints.folder)
    found = steps(root) if run.checkpoints.resume else []
    try:
        return read_values(root.child(step_name(found[-1]))) if found else None
    except (CorruptCheckpointError, OSError):
        return None


def choose_layout(run: RunConfig, ranks: int, *, simulate: int = 8, quiet: bool = False) -> RunConfig:
    """The run with the planner's layout. Engine options that the run config sets stay; the planner chooses the others.

    Ranks wait for it, so fewer layouts are simulated than by `fourfold plan`.
    """
    from fourfold.planner.plan import plan
    from fourfold.train.loop.model import model_config

    engine = run.engine
    found = plan(
        model_config(run.model),
        str(run.grid.cluster),
        ranks,
        sequences=run.sequences,
        length=run.data.sequence_length,
        simulate=simulate,
        weights=engine.weights if engine.weights != "auto" else None,
        precision=engine.precision,
        optimizer=run.optimizer.name,
        checkpointing=(engine.activation_checkpointing,)
        if _sets(run, "activation_checkpointing")
        else ("none", "full"),
        activations=engine.activations if engine.activations != "auto" else None,
        keep_inputs=(engine.keep_inputs,) if _sets(run, "keep_inputs") else (True, False),
        quiet=quiet,
    )
    micro_batch_rows = run.batch.micro_batch_sequences
    ranked = [
        estimate.layout
        for estimate in found.ranked
        if micro_batch_rows is None
        or _micro_batch_rows(run, estimate.layout)
        == min(micro_batch_rows, run.sequences // (estimate.layout.data * estimate.layout.z))
    ]
    if found.ranked and not ranked:
        raise ValueError(
            f"no layout of {ranks} ranks that can train this model takes batch.micro_batch_sequences={micro_batch_rows}; leave it "
            f"out, or use {_micro_batch_rows(run, found.ranked[0].layout)}, which is the fastest"
        )
    # The samples of the evaluation are divided among the ranks as those of the batch.
    fitting = [layout for layout in ranked if run.evaluation.sequences % (layout.data * layout.z) == 0]
    if ranked and not fitting:
        layout = ranked[0]
        raise ValueError(
            f"evaluation.sequences={run.evaluation.sequences} does not divide over the data*z of any layout of {ranks} ranks; "
            f"use a multiple of {layout.data * layout.z}, which is the fastest"
        )
    if not found.ranked:
        why = "; ".join(f"{r.layout}: {r.reason}" for r in found.rejected[:3])
        raise ValueError(
            f"no layout of {ranks} ranks can train this model on {run.grid.cluster}: {why}; use more ranks, or another "
            "batch.tokens"
        )
    return with_layout(run, fitting[0])


def with_layout(run: RunConfig, layout: Layout) -> RunConfig:
    """The run with a layout's grid, micro-batches and engine; engine options that the run config sets stay."""
    kept_bytes = run.engine.keep_weights_bytes
    changes: dict[str, dict[str, Any]] = {
        "grid": {"auto": False, "data": layout.data, "z": layout.z, "y": layout.y, "x": layout.x},
        "engine": {
            "activations": layout.activations,
            "keep_inputs": layout.keep_inputs,
            "activation_checkpointing": layout.activation_checkpointing,
            "weights": layout.weights,
            "keep_weights_bytes": kept_bytes if _sets(run, "keep_weights_bytes") else layout.keep_bytes,
        },
        "batch": {"micro_batch_sequences": _micro_batch_rows(run, layout)},
    }
    sections = {name: getattr(run, name).model_copy(update=fields) for name, fields in changes.items()}
    return run.model_copy(update=sections)


def _sets(run: RunConfig, field: str) -> bool:
    return field in run.engine.model_fields_set


def _micro_batch_rows(run: RunConfig, layout: Layout) -> int:
    return run.sequences // (layout.data * layout.z * layout.micro_batches)
