"""What a run config leaves to the memory of the devices: how much is recomputed, and how gradients are added up."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from fourfold.config.schema import BY_MEMORY, EngineSection, RunConfig
from fourfold.parallel.checkpointing import KINDS
from fourfold.planner.cost.memory import Memory, memory
from fourfold.planner.inputs.layout import ACCUMULATION, Layout, undivided_axis
from fourfold.planner.search import RESERVE, least_recomputed

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fourfold.optim.kinds import Optimizer
    from fourfold.weights.quantization import Quantization


def fit_into_memory(run: RunConfig, device_bytes: float | None, target: str) -> RunConfig:
    """The run, which has a grid, with as little recomputation as fits into a device, and with gradients whole if they fit.

    Nothing is recomputed if the memory of the device, or of the model, is not known. What the run config sets stays.
    """
    if not run.engine.is_open:
        return run
    from fourfold.train.loop.model import model_config

    share = run.sequence_ranks
    rows = run.sequences * share // (run.shape[0] * run.shape[1])
    micro_batches = -(-rows // (run.batch.micro_batch_sequences or rows))
    chosen = fields_that_fit(
        model_config(run.model) if device_bytes else None,
        run.shape,
        run.engine,
        (rows // micro_batches, run.data.sequence_length, micro_batches),
        run.optimizer.name,
        device_bytes,
        target,
        run.lora.rank,
        run.lora.quantization,
        share,
    )
    return run.model_copy(update={"engine": run.engine.model_copy(update=chosen)})


def _weights(engine: EngineSection, target: str) -> Literal["fsdp2", "streamed"]:
    """What "auto" chooses on several ranks."""
    if engine.weights != "auto":
        return engine.weights
    return "fsdp2" if target == "cuda" else "streamed"


def fields_that_fit(
    model: Any,
    shape: tuple[int, int, int, int],
    engine: EngineSection,
    batch: tuple[int, int, int],
    optimizer: Optimizer,
    device_bytes: float | None,
    target: str,
    lora_rank: int = 0,
    quantization: Quantization = "none",
    sequence_ranks: int = 1,
) -> dict[str, Any]:
    """The fields `BY_MEMORY` of [engine] on a grid.

    ``model`` is a configuration, ``batch`` the (sequences, length) of a rank's micro-batch, whole ones, and the number of them. What the
    engine leaves open besides is as a run on ``target`` devices chooses it.
    """
    from fourfold.planner.dry_run_estimate import describe

    workload = None
    try:
        workload = describe(model)[1] if device_bytes else None
    except ValueError as error:  # of a family without formulas
        logger.warning(
            "Nothing is recomputed, and gradients are added up whole: %s. If that does not fit into memory, set "
            "engine.activation_checkpointing and engine.accumulation.",
            error,
        )
    # Formulas of shared sequences are those of the kernel that attention has for them.
    is_known = sequence_ranks == 1 or (
        target == "cuda" and engine.precision == "bf16" and workload is not None and not workload.not_shared
    )
    if not is_known and device_bytes:
        logger.warning(
            "Nothing is recomputed, and gradients are added up whole: the memory of sequence_ranks=%d is known for GPUs in bf16 alone, of "
            "models whose attention has a kernel. If that does not fit into memory, set engine.activation_checkpointing and "
            "engine.accumulation.",
            sequence_ranks,
        )
    if workload is None or device_bytes is None or not is_known:
        settled = engine.without_auto()
        return {name: getattr(settled, name) for name in BY_MEMORY}
    workload = workload.attended(engine.attention, target, engine.precision).adapted(lora_rank, quantization)
    *_, y, x = shape
    rows, length, micro_batches = batch
    own_length = length // sequence_ranks
    is_cut = x * y > 1 and engine.activations != "replicated" and undivided_axis(own_length, y, x) is None
    layout = Layout(
        *shape,
        micro_batches=micro_batches,
        keep_bytes=engine.keep_weights_bytes,
        weights=_weights(engine, target),
        activations="sequence-parallel" if is_cut else "replicated",
        keep_inputs=engine.keep_inputs,
        checkpointed_blocks=engine.checkpointed_blocks,
        activation_offloading=engine.activation_offloading and target == "cuda",
        experts=tuple(engine.experts) if isinstance(engine.experts, list) else "cut",
        sequence_ranks=sequence_ranks,
    )
    work_bytes = 2 if engine.precision == "bf16" else 4

    def memory_of(tried: Layout) -> Memory:
        return memory(workload, tried, rows * own_length, None, work_bytes, optimizer, length=length)

    kinds = KINDS if engine.activation_checkpointing == "auto" else (engine.activation_checkpointing,)
    ways = ACCUMULATION if engine.accumulation == "auto" else (engine.accumulation,)
    limit_bytes = device_bytes * (1 - RESERVE)
    tried = [
        least_recomputed(replace(layout, accumulation=way), kinds, workload.layers, memory_of, limit_bytes)
        for way in ways
    ]

    def cost(one: tuple[Layout, Memory]) -> tuple[float, list[int]]:
        found, peak = one
        counts = dict(found.checkpointing_of(workload.layers))
        return max(peak.total_bytes, limit_bytes), [counts.get(kind, 0) for kind in reversed(KINDS)]

    # The least recomputation of what fits, or the least memory if nothing does; whole gradients if both are equal.
    best, _ = min(tried, key=cost)
    return {name: getattr(best, name) for name in BY_MEMORY}
