"""Where the time of a step went: computation, and exposed communication of each axis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from fourfold.hf.packed_attention import FLEX
from fourfold.mesh.axes import AXES, Axis, axis_of_mesh
from fourfold.mesh.collectives import Entry
from fourfold.mesh.grid import Grid
from fourfold.parallel.linear import Linear4D
from fourfold.weights.api import backend_of


@dataclass
class StepReport:
    """The time of one step on one rank; filled in when the step is over.

    ``compute_s`` is the time in which this rank did not wait for a collective; on CUDA, in which its compute stream did not.
    On CUDA the waits inside FSDP2 are not observed and count as computation.
    """

    step_s: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    def exposed_s(self, axis: Axis | None = None) -> float:
        """Exposed communication: the seconds that this rank waited for an axis, or for all axes."""
        return sum(e.exposed_s for e in self.entries if axis is None or axis_of_mesh(e.axis) == axis)

    @property
    def compute_s(self) -> float:
        return self.step_s - self.exposed_s()

    def __str__(self) -> str:
        lines = [f"step {self.step_s:.4f} s = compute {self.compute_s:.4f}"]
        lines += [f"{axis} {self.exposed_s(axis):.4f}" for axis in AXES if self.exposed_s(axis)]
        return " + ".join(lines)


@contextmanager
def measure_step(grid: Grid) -> Iterator[StepReport]:
    """Measure the time of the body, and the part of it spent waiting for collectives.

    Example:
        >>> with measure_step(grid) as report:
        ...     model(input_ids=ids, labels=ids).loss.backward()
        >>> report.exposed_s() <= report.step_s
        True
    """
    report = StepReport()
    clock = grid.collectives.clock
    with grid.collectives.counting() as entries:
        start = clock.mark()
        yield report
        end = clock.mark()
    report.entries = entries
    report.step_s = clock.elapsed_s(start, end)


def describe_layout(
    model: nn.Module, grid: Grid, *, micro_batches: int, keep_bytes: int, **other_fields: Any
) -> dict[str, Any]:
    """The layout of a model in the fields of the planner's `Layout`; ``keep_bytes`` applies to streamed weights only."""
    backend = backend_of(model)
    streamed = backend is not None and backend.name == "streamed"
    # The settings of any linear whose activations are sequence-parallel.
    linears = (m for m in model.modules() if isinstance(m, Linear4D))
    sharded = next((linear for linear in linears if linear.group.tokens is not None), None)
    return {
        **{axis: grid.size(axis) for axis in AXES},
        "micro_batches": micro_batches,
        "keep_bytes": keep_bytes if streamed else 0,
        "weights": "streamed" if streamed else "fsdp2",
        "activations": "replicated" if sharded is None else "sequence-parallel",
        "keep_inputs": sharded is None or sharded.group.overlap.keep_inputs,
        "sequence_ranks": grid.sequence_ranks,
        **other_fields,
    }


def save_run(
    path: str | Path,
    reports: Sequence[StepReport],
    model: nn.Module,
    grid: Grid,
    *,
    sequences: int,
    length: int,
    micro_batches: int = 1,
    activation_checkpointing: str = "none",
    checkpointed_blocks: int | None = None,
    accumulation: str = "whole",
    keep_bytes: int = 0,
    precision: str = "bf16",
    compile: bool = False,
    optimizer: str = "adamw",
    activation_offloading: bool = False,
    float8: str = "none",
    experts: str | Sequence[str] = "cut",
) -> None:
    """Write the median times of some steps, and the layout, for ``fourfold plan --compare-to``. Call it on one rank.

    Measure complete steps, including clipping and the optimizer, and leave out the first two. ``sequences`` is the global
    batch size of a step, and ``optimizer`` the one of a run config that is like yours.

    Example:
        >>> with measure_step(grid) as report:
        ...     model(input_ids=ids, labels=ids).loss.backward()
        >>> save_run(folder / "run.json", [report], model, grid, sequences=2, length=8)
    """
    if not reports:
        raise ValueError("0 steps were measured; pass at least 1 report of measure_step")
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ValueError(
            f"{type(model).__name__} has no Hugging Face config to save; pass a model that has one"
        )
    run: dict[str, Any] = {
        "model": config.to_dict(),
        "layout": describe_layout(
            model,
            grid,
            micro_batches=micro_batches,
            keep_bytes=keep_bytes,
            activation_checkpointing=activation_checkpointing,
            checkpointed_blocks=checkpointed_blocks,
            accumulation=accumulation,
            activation_offloading=activation_offloading and grid.target == "cuda",
            experts=experts if experts != "auto" else "cut",
        ),
        "sequences": sequences,
        "length": length,
        "precision": precision,
        "compile": compile,
        "optimizer": optimizer,
        # A loop of one's own has what the model says, unless it took this one.
        "attention": "flex" if getattr(config, "_attn_implementation", None) == FLEX else "varlen",
        "float8": float8,
        "steps": len(reports),
        "measured": {
            "step_s": median(r.step_s for r in reports),
            "compute_s": median(r.compute_s for r in reports),
            "exposed_s": {axis: median(r.exposed_s(axis) for r in reports) for axis in AXES},
        },
    }
    Path(path).write_text(json.dumps(run, default=str))
