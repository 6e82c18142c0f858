"""`grid.auto`: the planner's fastest layout for the ranks that are there, as if it had been written into the run's file.

When a host is gone or two have come, the same run finds another number of ranks, and gets another layout with the same global
batch. Started again on as many as before, it keeps the layout of its newest checkpoint, and nobody waits for the planner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.checkpoint.commit import step_name
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import Damaged
from fourfold.checkpoint.retention import steps
from fourfold.checkpoint.state import read_values
from fourfold.config.run_file import from_dict
from fourfold.config.schema import CHOSEN_ALONG, RunConfig

if TYPE_CHECKING:
    from fourfold.planner.inputs.layout import Layout


FEWER = 64  # ranks that may be left idle, before a number of them is refused


def settle(run: RunConfig, ranks: int, *, simulate: int = 8, quiet: bool = False) -> RunConfig:
    """The run with a layout for these ranks, or for fewer if these cannot share the work."""
    kept = layout_of_checkpoint(run, ranks)
    if kept is not None:
        return kept
    # Whoever starts again has ranks that wait: formulas alone choose then, in less than a second.
    simulate = 0 if _newest_values(run) is not None else simulate
    refusals: list[ValueError] = []
    for used in range(ranks, max(0, ranks - FEWER - 1), -1):
        try:
            return choose_layout(run, used, simulate=simulate, quiet=quiet)
        except ValueError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def layout_of_checkpoint(run: RunConfig, ranks: int) -> RunConfig | None:
    """The run on the layout of its newest checkpoint, if that uses all of these ranks, and what the run asks for is so."""
    values = _newest_values(run)
    if values is None:
        return None
    try:
        before = from_dict(values["config"])
    except ValueError:  # of another version, or of no run
        return None
    given = CHOSEN_ALONG & run.engine.model_fields_set
    # With one tensor rank there is nothing to cut, whatever was asked for.
    cuts = before.grid.x * before.grid.y > 1
    is_same = (
        before.grid.size == ranks
        and before.grid.cluster == run.grid.cluster
        and before.model == run.model
        and before.sequences == run.sequences
        and before.data.sequence_length == run.data.sequence_length
        and before.engine.precision == run.engine.precision
        and before.optimizer.name == run.optimizer.name
        and run.engine.weights in ("auto", before.engine.weights)
        and (not cuts or run.engine.activations in ("auto", before.engine.activations))
        and run.batch.micro_batch_sequences in (None, before.batch.micro_batch_sequences)
        and all(
            getattr(run.engine, name) == getattr(before.engine, name)
            for name in given
            if cuts or name != "keep_inputs"
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
    """What the newest checkpoint says beside its tensors."""
    root = open_folder(run.checkpoints.folder)
    found = steps(root) if run.checkpoints.resume else []
    try:
        return read_values(root.child(step_name(found[-1]))) if found else None
    except (Damaged, OSError):
        return None


def choose_layout(run: RunConfig, ranks: int, *, simulate: int = 8, quiet: bool = False) -> RunConfig:
    """The run on the planner's choice. What the file says of the engine stays; the rest is chosen along.

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
        if _says(run, "activation_checkpointing")
        else ("none", "full"),
        activations=engine.activations if engine.activations != "auto" else None,
        keep_inputs=(engine.keep_inputs,) if _says(run, "keep_inputs") else (True, False),
        quiet=quiet,
    )
    rows_at_once = run.batch.micro_batch_sequences
    ranked = [
        estimate.layout
        for estimate in found.ranked
        if rows_at_once is None
        or _rows_at_once(run, estimate.layout)
        == min(rows_at_once, run.sequences // (estimate.layout.data * estimate.layout.z))
    ]
    if found.ranked and not ranked:
        raise ValueError(
            f"no layout of {ranks} ranks that can train this model takes batch.micro_batch_sequences={rows_at_once}; leave it "
            f"out, or use {_rows_at_once(run, found.ranked[0].layout)}, which is the fastest"
        )
    # The samples of the evaluation are shared like those of the batch.
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
    """The run with a layout's grid, micro-batches and engine; what its file says of the engine stays."""
    kept_bytes = run.engine.keep_weights_bytes
    changes: dict[str, dict[str, Any]] = {
        "grid": {"auto": False, "data": layout.data, "z": layout.z, "y": layout.y, "x": layout.x},
        "engine": {
            "activations": layout.activations,
            "keep_inputs": layout.keep_inputs,
            "activation_checkpointing": layout.activation_checkpointing,
            "weights": layout.weights,
            "keep_weights_bytes": kept_bytes if _says(run, "keep_weights_bytes") else layout.keep_bytes,
        },
        "batch": {"micro_batch_sequences": _rows_at_once(run, layout)},
    }
    sections = {name: getattr(run, name).model_copy(update=fields) for name, fields in changes.items()}
    return run.model_copy(update=sections)


def _says(run: RunConfig, field: str) -> bool:
    return field in run.engine.model_fields_set


def _rows_at_once(run: RunConfig, layout: Layout) -> int:
    return run.sequences // (layout.data * layout.z * layout.micro_batches)
