"""Commits a checkpoint atomically.

On a disk it is written as ``step-N.tmp``, synced, and renamed to ``step-N``. An object store cannot rename, but a file
appears in it only when it is complete: there the manifest, written last, commits the checkpoint. An existing checkpoint
is never overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fourfold.checkpoint.folder import FileRecord, Folder
from fourfold.checkpoint.manifest import MANIFEST, CheckpointManifest

_STEP = re.compile(r"step-(0|[1-9]\d*)")


def step_name(step: int) -> str:
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def is_committed(root: Folder, step: int) -> bool:
    return root.child(step_name(step)).size(MANIFEST) is not None


def unfinished(root: Folder, step: int) -> Folder:
    """The folder that the files of a checkpoint are written to before the commit."""
    return root.child(f"{step_name(step)}.tmp" if root.renames else step_name(step))


def begin(root: Folder, step: int) -> None:
    """Create the folder of a checkpoint, on one rank; remove what an interrupted save left there."""
    taken = step_name(step) in root.names() if root.renames else is_committed(root, step)
    if taken:
        raise FileExistsError(
            f"{root}/{step_name(step)} exists, and a checkpoint is never overwritten; resume from it, save to another folder, or "
            "move it away"
        )
    root.remove(f"{step_name(step)}.tmp" if root.renames else step_name(step))
    unfinished(root, step).make()


def commit(root: Folder, step: int, files: Mapping[str, FileRecord]) -> None:
    """Commit a checkpoint whose ``files`` are all written, on one rank."""
    folder = unfinished(root, step)
    for name, record in sorted(files.items()):
        size = folder.size(name)
        if size != record.size:
            seen = "nothing" if size is None else f"{size} bytes"
            raise OSError(
                f"{folder}/{name} was written with {record.size} bytes, but rank 0 sees {seen}; save to a folder that all "
                "hosts share"
            )
    folder.write(MANIFEST, [CheckpointManifest(step, files).to_bytes()])
    if root.renames:
        root.rename(f"{step_name(step)}.tmp", step_name(step))
