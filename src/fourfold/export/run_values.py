"""Values of the run stored in a checkpoint; any may be missing, because the training loop may be the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fourfold.train.observe.metrics import METRICS, read_metrics


def value_at(values: Any, *path: str) -> Any:
    """The value at a path of keys, or None.

    Example:
        >>> value_at({"config": {"optimizer": {"lr": 0.001}}}, "config", "optimizer", "lr")
        0.001
        >>> value_at({"config": "custom"}, "config", "optimizer", "lr") is None
        True
    """
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def data_sources(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The datasets of the run config, each with the fingerprint of the data that was read."""
    named = value_at(values, "config", "data", "sources")
    named = [s for s in named if isinstance(s, dict)] if isinstance(named, list) else []
    fingerprints = value_at(values, "data", "sources")
    if not isinstance(fingerprints, list) or len(fingerprints) != len(named):
        return named
    return [{**source, "fingerprint": f} for source, f in zip(named, fingerprints, strict=True)]


def last_losses(values: dict[str, Any]) -> dict[str, tuple[int, float, Path]]:
    """The last ``loss`` and ``validation_loss`` up to the checkpoint's step: (step, value, file)."""
    folder = value_at(values, "config", "logging", "folder")
    if not isinstance(folder, str) or not (file := Path(folder) / METRICS).is_file():
        return {}
    found: dict[str, tuple[int, float, Path]] = {}
    for line in read_metrics(Path(folder)):
        step = int(line["step"])
        if step <= values["step"]:
            found |= {n: (step, line[n], file) for n in ("loss", "validation_loss") if n in line}
    return found
