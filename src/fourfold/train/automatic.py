"""`grid.auto`: the planner's fastest layout for the ranks that are there, as if it had been written into the run's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.train.config import RunConfig

if TYPE_CHECKING:
    from fourfold.planner.layout import Layout


def choose_layout(run: RunConfig, ranks: int, *, simulate: int = 8, quiet: bool = False) -> RunConfig:
    """The run on the planner's choice. What the file says of the engine stays; the rest is chosen along.

    Ranks wait for it, so fewer layouts are played through than `fourfold plan` does.
    """
    from fourfold.planner.plan import plan
    from fourfold.train.model import model_config

    engine = run.engine
    is_given = "activation_checkpointing" in engine.model_fields_set
    inputs_are_given = "keep_inputs" in engine.model_fields_set
    found = plan(
        model_config(run.model),
        str(run.grid.cluster),
        ranks,
        sequences=run.sequences,
        length=run.data.sequence_length,
        simulate=simulate,
        weights=engine.weights if engine.weights != "auto" else None,
        precision=engine.precision,
        checkpointing=(engine.activation_checkpointing,) if is_given else ("none", "full"),
        activations=engine.activations if engine.activations != "auto" else None,
        keep_inputs=(engine.keep_inputs,) if inputs_are_given else (True, False),
        quiet=quiet,
    )
    if not found.ranked:
        why = "; ".join(f"{r.layout}: {r.reason}" for r in found.rejected[:3])
        raise ValueError(
            f"no layout of {ranks} ranks can train this model on {run.grid.cluster}: {why}; use more ranks, or another "
            "batch.tokens"
        )
    return with_layout(run, found.ranked[0].layout)


def with_layout(run: RunConfig, layout: Layout) -> RunConfig:
    """The run with a layout's grid, micro-batches and engine."""
    rows = run.sequences // (layout.data * layout.z)
    changes: dict[str, dict[str, Any]] = {
        "grid": {"auto": False, "data": layout.data, "z": layout.z, "y": layout.y, "x": layout.x},
        "engine": {
            "activations": layout.activations,
            "keep_inputs": layout.keep_inputs,
            "activation_checkpointing": layout.activation_checkpointing,
            "weights": layout.weights,
            "keep_weights_bytes": layout.keep_bytes,
        },
        "batch": {"micro_batch_sequences": rows // layout.micro_batches},
    }
    sections = {name: getattr(run, name).model_copy(update=fields) for name, fields in changes.items()}
    return run.model_copy(update=sections)
