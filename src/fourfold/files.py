"""Small files: atomic writes, appended lines, JSON tables, TOML values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file and make its folder if needed; a kill in the middle leaves the old content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def open_append(path: Path) -> IO[bytes]:
    """Open a file to add lines to it, and make its folder if needed; each write is there at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The table in a JSON file; ``default`` if there is no such file."""
    if default is not None and not path.exists():
        return default
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def toml_value(value: Any) -> str:
    """
    Example:
        >>> toml_value([{"path": "text", "weight": 2.0}])
        '[{path = "text", weight = 2.0}]'
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    # A JSON string is a TOML basic string, but for the surrogate pairs that JSON writes without `ensure_ascii=False`.
    return json.dumps(str(value), ensure_ascii=False)
