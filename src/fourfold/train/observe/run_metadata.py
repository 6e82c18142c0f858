"""Metadata of a run: a line for the console, and ``run.json`` next to its metrics."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from fourfold import files
from fourfold.checkpoint.state import versions
from fourfold.data.manifest import DatasetManifest
from fourfold.profiling.step_report import describe_layout
from fourfold.train.loop.trainer import Trainer
from fourfold.untrusted_input import read_json

RUN_METADATA = "run.json"


def run_metadata(trainer: Trainer) -> dict[str, Any]:
    """All that the report needs in addition to the metrics of the steps."""
    run, grid = trainer.run, trainer.grid
    config: Any = trainer.model.config
    return {
        "model": config.to_dict(),
        "name": trainer.report.model,
        "parameters": parameter_count(trainer),
        "layout": describe_layout(
            trainer.model,
            grid,
            micro_batches=trainer.micro_batches,
            keep_bytes=run.engine.keep_weights_bytes,
            activation_checkpointing=run.engine.activation_checkpointing,
            checkpointed_blocks=run.engine.checkpointed_blocks,
            accumulation=run.engine.accumulation,
            activation_offloading=run.engine.activation_offloading and grid.target == "cuda",
            experts="cut" if run.engine.experts == "auto" else run.engine.experts,
        )
        | {"data": grid.data * trainer.replicas.planned},
        "data": [
            {
                "path": str(source.path),
                "weight": source.weight,
                "tokens": DatasetManifest.load(source.path).tokens("train"),
            }
            for source in run.data.sources
        ],
        "device": device_name(grid.device),
        "versions": versions(),
        "config": run.model_dump(mode="json"),
        "compiled": trainer.report.compiled,
    }


def record_start(folder: Path, trainer: Trainer) -> None:
    """Write ``run.json``; a resumed run adds its start to those before it."""
    resumes = trainer.step and (folder / RUN_METADATA).exists()
    before = read_run_metadata(folder)["starts"] if resumes else []
    start = {"step": trainer.step, "time": time.time(), "grid": list(trainer.grid.shape)}
    write_run_metadata(folder, {**run_metadata(trainer), "starts": [*before, start]})


def write_run_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    files.write_atomically(folder / RUN_METADATA, json.dumps(metadata, indent=1, default=str))


def read_run_metadata(folder: Path) -> dict[str, Any]:
    path = folder / RUN_METADATA
    if not path.exists():
        raise ValueError(f"there is no {path}; give the [logging] folder of the run config")
    return read_json(path)


def describe_run(trainer: Trainer) -> str:
    """The run in one line."""
    run, grid = trainer.run, trainer.grid
    ranks = grid.mesh.size()
    count = -(-run.sequences // (grid.batch_ranks * trainer.micro_batch_rows))
    parts = [
        f"{trainer.report.model}, {amount(parameter_count(trainer))} parameters",
        f"{ranks} rank{'s' if ranks > 1 else ''} {grid}",
        f"{run.sequences} x {run.data.sequence_length} tokens per step"
        + (f", each sequence on {grid.sequence_ranks} ranks" if grid.sequence_ranks > 1 else "")
        + (f" in {count} micro-batches of {trainer.micro_batch_rows}" if count > 1 else ""),
        f"{run.engine.precision} on {device_name(grid.device)}",
    ]
    return " · ".join(parts)


def parameter_count(trainer: Trainer) -> int:
    return sum(math.prod(layout.shape) for layout in trainer.report.layouts.values())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def amount(number: float) -> str:
    """
    Example:
        >>> [amount(n) for n in (950, 12_300, 8.03e9)]
        ['950', '12.3K', '8.03B']
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"
