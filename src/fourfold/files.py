"""Small files: atomic writes, appended lines, TOML values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any, BinaryIO


def unfinished(path: Path) -> Path:
    """The name of a file while it is written."""
    # By process: one that outlives a killed parent for a moment must not write into the file of the next.
    return path.with_name(f"{path.name}.{os.getpid()}.unfinished")


def publish(file: BinaryIO, path: Path) -> None:
    """Sync and close the unfinished file of ``path``, then give it its name."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(unfinished(path), path)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write all of the file or nothing, also if the machine stops; make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = unfinished(path).open("wb")
    file.write(content.encode() if isinstance(content, str) else content)
    publish(file, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the new name is durable only when its folder is synced
    finally:
        os.close(descriptor)


def open_append(path: Path) -> IO[bytes]:
    """Open a file to add lines to it, and make its folder if needed; each write is there at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


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
