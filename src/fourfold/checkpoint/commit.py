"""How a checkpoint comes into being: not at all, or whole.

On a disk it is written as ``step-N.tmp``, synced, and renamed to ``step-N``. An object store renames nothing, but
files appear whole in it: there the manifest, written last, makes the checkpoint. A name that is taken is never
written to.
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
    """The step of a checkpoint's folder; of any other name none."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def is_committed(root: Folder, step: int) -> bool:
    return root.child(step_name(step)).size(MANIFEST) is not None


def unfinished(root: Folder, step: int) -> Folder:
    """Where the files of a checkpoint are written."""
    return root.child(f"{step_name(step)}.tmp" if root.renames else step_name(step))


def begin(root: Folder, step: int) -> None:
    """Make room for a checkpoint, on one rank; what an earlier attempt left unfinished is removed."""
    taken = step_name(step) in root.names() if root.renames else is_committed(root, step)
    if taken:
        raise FileExistsError(
            f"{root}/{step_name(step)} exists, and a checkpoint is never overwritten; resume from it, save elsewhere, or "
            "move it away"
        )
    root.remove(f"{step_name(step)}.tmp" if root.renames else step_name(step))
    unfinished(root, step).make()


def commit(root: Folder, step: int, files: Mapping[str, FileRecord]) -> None:
    """Make the checkpoint of ``files``, all of them written, on one rank."""
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
