"""What a run is, for people: in a line on the screen, and in ``run.json`` beside its metrics."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.state import versions
from fourfold.data.manifest import DatasetManifest
from fourfold.profiling.step_report import describe_layout
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.metrics import replace_file

FACTS = "run.json"


def facts_of(trainer: Trainer) -> dict[str, Any]:
    """All that the report needs beside the figures of the steps."""
    run, grid = trainer.run, trainer.grid
    config: Any = trainer.model.config
    return {
        "model": config.to_dict(),
        "name": trainer.report.model,
        "parameters": parameters(trainer),
        "layout": describe_layout(
            trainer.model,
            grid,
            trainer.micro_batches,
            run.engine.activation_checkpointing,
            run.engine.keep_weights_bytes,
        )
        | {"data": grid.data * trainer.replicas},
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
    }


def write_facts(folder: Path, trainer: Trainer) -> None:
    """A resumed run adds its start to those before it."""
    before = read_facts(folder)["starts"] if trainer.step and (folder / FACTS).exists() else []
    start = {"step": trainer.step, "time": time.time(), "grid": list(trainer.grid.shape)}
    save_facts(folder, {**facts_of(trainer), "starts": [*before, start]})


def save_facts(folder: Path, facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FACTS, json.dumps(facts, indent=1, default=str).encode())


def read_facts(folder: Path) -> dict[str, Any]:
    path = folder / FACTS
    if not path.exists():
        raise ValueError(f"there is no {path}; give the folder that [logging] folder of the run's file names")
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def in_words(trainer: Trainer) -> str:
    """The run in a line."""
    run, grid = trainer.run, trainer.grid
    ranks = grid.mesh.size()
    words = [
        f"{trainer.report.model}, {amount(parameters(trainer))} parameters",
        f"{ranks} rank{'s' if ranks > 1 else ''} {grid}",
        f"{run.sequences} x {run.data.sequence_length} tokens a step",
        f"{run.engine.precision} on {device_name(grid.device)}",
    ]
    return " · ".join(words)


def parameters(trainer: Trainer) -> int:
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
