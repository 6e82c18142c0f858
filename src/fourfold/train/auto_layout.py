"""The layout of a run whose config sets no grid, as if the config had it.

With `grid.cluster` it is the planner's fastest one for the available ranks. Otherwise nothing is known of the machines, and
all ranks are on z (FSDP), with small micro-batches.

A restart on a different number of ranks gets a different layout with the same global batch. A restart on the same number of
ranks keeps the layout of the newest checkpoint, without waiting for the planner.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fourfold.checkpoint.commit import step_name, steps
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import CorruptCheckpointError
from fourfold.checkpoint.state import read_values
from fourfold.config.run_file import from_dict
from fourfold.config.schema import CHOSEN_ALONG, EngineSection, RunConfig, UndividedEvaluation
from fourfold.mesh.axes import divisors
from fourfold.planner.cost.memory import Memory, memory
from fourfold.planner.inputs.layout import KINDS, Accumulation, Checkpointing, Layout, undivided_axis
from fourfold.planner.search import RESERVE, least_recomputed

if TYPE_CHECKING:
    from fourfold.planner.cost.optimizer import Optimizer
    from fourfold.planner.cost.step import Estimate
    from fourfold.planner.search import Plan


MAX_IDLE = 64  # ranks that a layout may leave unused
# Where nothing is known of the devices: tokens of a micro-batch, unless a sequence is longer.
MICRO_BATCH_TOKENS = 8192
# What a layout is chosen for.
_INPUTS = attrgetter(
    "grid.cluster", "model", "sequences", "data.sequence_length", "engine.precision", "optimizer.name"
)


# Fields that are chosen by the memory of a device.
_BY_MEMORY = ("activation_checkpointing", "checkpointed_blocks", "accumulation")


def resume_or_choose_layout(
    run: RunConfig, ranks: int, *, simulate: int = 8, quiet: bool = False
) -> RunConfig:
    """The run with a layout for these ranks, or for fewer if no layout uses all of them."""
    kept = layout_of_checkpoint(run, ranks)
    if kept is not None:
        return kept
    is_restart = _newest_values(run) is not None
    # In a restart ranks wait: choose by formulas alone then, in less than a second.
    simulate = 0 if is_restart else simulate
    errors: list[ValueError] = []
    for used in range(ranks, max(0, ranks - MAX_IDLE - 1), -1):
        try:
            return choose_layout(run, used, simulate=simulate, quiet=quiet)
        except UndividedEvaluation as error:
            if not is_restart:  # idle ranks cost more than another number of samples
                raise
            errors.append(error)
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
        and run.engine.accumulation in ("auto", before.engine.accumulation)
        and (
            run.engine.activation_checkpointing == "auto"
            or all(getattr(run.engine, name) == getattr(before.engine, name) for name in _BY_MEMORY[:2])
        )
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
    names = (*CHOSEN_ALONG, *_BY_MEMORY, "weights", "activations")
    chosen = {name: getattr(before.engine, name) for name in names}
    rows = before.batch.micro_batch_sequences
    found = _with_sections(run, batch={"micro_batch_sequences": rows}, engine=chosen)
    return found.model_copy(update={"grid": before.grid})


def _newest_values(run: RunConfig) -> dict[str, Any] | None:
    """The values of the newest checkpoint that are not tensors."""
    root = open_folder(run.checkpoints.folder)
    found = steps(root) if run.checkpoints.resume else []
    try:
        return read_values(root.child(step_name(found[-1]))) if found else None
    except (CorruptCheckpointError, OSError):
        return None


def choose_layout(run: RunConfig, ranks: int, *, simulate: int = 8, quiet: bool = False) -> RunConfig:
    """The run with a layout for these ranks. Options that the run config sets stay.

    Ranks wait for it, so fewer layouts are simulated than by `fourfold plan`.
    """
    if run.grid.cluster is None:
        return all_on_z(run, ranks)
    from fourfold.planner.plan import plan
    from fourfold.train.loop.model import model_config

    found = plan(
        model_config(run.model),
        run.grid.cluster,
        ranks,
        **plan_options(run),
        simulate=simulate,
        quiet=quiet,
    )
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
    if run.evaluation.sequences % ranks:
        raise UndividedEvaluation(run.evaluation.sequences, ranks)
    rows = run.batch.micro_batch_sequences
    if rows is None:
        most = max(1, MICRO_BATCH_TOKENS // run.data.sequence_length)
        rows = max(n for n in divisors(run.sequences // ranks) if n <= most)
    return _with_sections(
        run, grid={"data": 1, "z": ranks, "y": 1, "x": 1}, batch={"micro_batch_sequences": rows}
    )


def is_open(run: RunConfig) -> bool:
    """Does the run config leave something to the memory of the devices?"""
    return "auto" in (run.engine.activation_checkpointing, run.engine.accumulation)


def fit_into_memory(run: RunConfig, device_bytes: float | None, target: str) -> RunConfig:
    """The run, which has a grid, with as little recomputation as fits into a device, and with gradients whole if they fit.

    Nothing is recomputed if the memory of the device, or of the model, is not known. What the run config sets stays.
    """
    if not is_open(run):
        return run
    from fourfold.train.loop.model import model_config

    rows = run.sequences // (run.shape[0] * run.shape[1])
    micro_batches = -(-rows // (run.batch.micro_batch_sequences or rows))
    chosen = fields_that_fit(
        model_config(run.model) if device_bytes else None,
        run.shape,
        run.engine,
        (rows // micro_batches, run.data.sequence_length, micro_batches),
        run.optimizer.name,
        device_bytes,
        target,
    )
    return _with_sections(run, engine=chosen)


def fields_that_fit(
    model: Any,
    shape: tuple[int, int, int, int],
    engine: EngineSection,
    batch: tuple[int, int, int],
    optimizer: Optimizer,
    device_bytes: float | None,
    target: str,
) -> dict[str, Any]:
    """The fields of [engine] that say what is recomputed on a grid, and how gradients are added up.

    ``model`` is a configuration, ``batch`` the (sequences, length) of a rank's micro-batch and the number of them. What the
    engine leaves open is as a run on ``target`` devices chooses it.
    """
    from fourfold.planner.dry_run_estimate import describe

    _, workload = describe(model) if device_bytes else (None, None)
    kinds: tuple[Checkpointing, ...] = KINDS
    if engine.activation_checkpointing != "auto":
        kinds = (engine.activation_checkpointing,)
    if workload is None or device_bytes is None:
        settled = engine.without_auto()
        return {name: getattr(settled, name) for name in _BY_MEMORY}
    *_, y, x = shape
    rows, length, micro_batches = batch
    is_cut = x * y > 1 and engine.activations != "replicated" and undivided_axis(length, y, x) is None
    layout = Layout(
        *shape,
        micro_batches=micro_batches,
        keep_bytes=engine.keep_weights_bytes,
        weights=engine.weights if engine.weights != "auto" else "fsdp2" if target == "cuda" else "streamed",
        activations="sequence-parallel" if is_cut else "replicated",
        keep_inputs=engine.keep_inputs,
        checkpointed_blocks=engine.checkpointed_blocks,
    )
    work_bytes = 2 if engine.precision == "bf16" else 4

    def memory_of(tried: Layout) -> Memory:
        return memory(workload, tried, rows * length, None, work_bytes, optimizer)

    ways: list[Accumulation] = (
        ["whole", "sharded"] if engine.accumulation == "auto" else [engine.accumulation]
    )
    limit_bytes = device_bytes * (1 - RESERVE)
    tried = [
        least_recomputed(replace(layout, accumulation=way), kinds, workload.layers, memory_of, limit_bytes)
        for way in ways
    ]

    def cost(one: tuple[Layout, Memory]) -> tuple[bool, list[int]]:
        found, peak = one
        counts = dict(found.checkpointing_of(workload.layers))
        return peak.total_bytes > limit_bytes, [counts.get(kind, 0) for kind in reversed(KINDS)]

    best, _ = min(tried, key=cost)  # the first of those that recompute as little
    return {name: getattr(best, name) for name in _BY_MEMORY}


def plan_options(run: RunConfig) -> dict[str, Any]:
    """The arguments of `fourfold.plan` by which it considers what the run config leaves open."""
    engine = run.engine
    return {
        "sequences": run.sequences,
        "length": run.data.sequence_length,
        "weights": engine.weights if engine.weights != "auto" else None,
        "precision": engine.precision,
        "optimizer": run.optimizer.name,
        **(
            {
                "checkpointing": (engine.activation_checkpointing,),
                "checkpointed_blocks": engine.checkpointed_blocks,
            }
            if engine.activation_checkpointing != "auto"
            else {}
        ),
        **({"accumulation": (engine.accumulation,)} if engine.accumulation != "auto" else {}),
        "activations": engine.activations if engine.activations != "auto" else None,
        "keep_inputs": (engine.keep_inputs,) if _sets(run, "keep_inputs") else (True, False),
    }


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
        if rows is None
        or _micro_batch_rows(run, estimate.layout)
        == min(rows, run.sequences // (estimate.layout.data * estimate.layout.z))
    ]
    if not ranked:
        raise ValueError(
            f"no layout of {found.ranks} ranks that can train this model takes batch.micro_batch_sequences={rows}; leave it "
            f"out, or use {_micro_batch_rows(run, found.ranked[0].layout)}, which is the fastest"
        )
    # The samples of the evaluation are divided among the ranks as those of the batch.
    sequences = run.evaluation.sequences
    fitting = [e for e in ranked if sequences % (e.layout.data * e.layout.z) == 0]
    if not fitting:
        raise UndividedEvaluation(sequences, ranked[0].layout.data * ranked[0].layout.z)
    return fitting[0]


def with_layout(run: RunConfig, layout: Layout) -> RunConfig:
    """The run with a layout's grid, micro-batches and engine; engine options that the run config sets stay."""
    return _with_sections(run, **layout_fields(run, layout))


def layout_fields(run: RunConfig, layout: Layout) -> dict[str, dict[str, Any]]:
    """The fields of a run config that say what a layout says, by their sections."""
    kept_bytes = run.engine.keep_weights_bytes
    return {
        "grid": {"data": layout.data, "z": layout.z, "y": layout.y, "x": layout.x},
        "batch": {"micro_batch_sequences": _micro_batch_rows(run, layout)},
        "engine": {
            "activations": layout.activations,
            "keep_inputs": layout.keep_inputs,
            "activation_checkpointing": layout.activation_checkpointing,
            "checkpointed_blocks": layout.checkpointed_blocks,
            "accumulation": layout.accumulation,
            "weights": layout.weights,
            "keep_weights_bytes": kept_bytes if _sets(run, "keep_weights_bytes") else layout.keep_bytes,
        },
    }


def without_layout(run: RunConfig) -> RunConfig:
    """The run as if its config set neither a grid nor micro-batches: what a plan is made for."""
    values = run.model_dump(exclude_unset=True)
    values["grid"] = {"cluster": run.grid.cluster}
    values.get("batch", {}).pop("micro_batch_sequences", None)
    return from_dict(values)


def _with_sections(run: RunConfig, **changes: dict[str, Any]) -> RunConfig:
    sections = {name: getattr(run, name).model_copy(update=fields) for name, fields in changes.items()}
    return run.model_copy(update=sections)


def _sets(run: RunConfig, field: str) -> bool:
    return field in run.engine.model_fields_set


def _micro_batch_rows(run: RunConfig, layout: Layout) -> int:
    return run.sequences // (layout.data * layout.z * layout.micro_batches)
