"""Files that are complete under their name, or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


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


def write_atomically(path: Path, data: bytes) -> None:
    """Write all of the file or nothing, also if the machine stops."""
    file = unfinished(path).open("wb")
    file.write(data)
    publish(file, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the new name is durable only when its folder is synced
    finally:
        os.close(descriptor)
