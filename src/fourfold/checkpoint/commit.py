"""The checkpoints of a run's folder: committed atomically, listed, removed.

On a disk a checkpoint is written as ``step-N.tmp``, synced, and renamed to ``step-N``. An object store cannot rename,
but a file appears in it only when it is complete: there the manifest, written last, commits the checkpoint. An existing
checkpoint is never overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from fourfold.checkpoint.folder import FileRecord, Folder
from fourfold.checkpoint.manifest import MANIFEST, manifest_bytes

_STEP = re.compile(r"step-(0|[1-9]\d*)")


def step_name(step: int) -> str:
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def is_committed(root: Folder, step: int) -> bool:
    return root.child(step_name(step)).size(MANIFEST) is not None


def unfinished_name(root: Folder, name: str) -> str:
    return f"{name}.tmp" if root.renames else name


def unfinished(root: Folder, step: int) -> Folder:
    """The folder that the files of a checkpoint are written to before the commit."""
    return root.child(unfinished_name(root, step_name(step)))


def begin(root: Folder, step: int) -> None:
    """Create the folder of a checkpoint, on one rank; remove what an interrupted save left there."""
    taken = step_name(step) in root.names() if root.renames else is_committed(root, step)
    if taken:
        raise FileExistsError(
            f"{root}/{step_name(step)} exists, and a checkpoint is never overwritten; resume from it, save to another folder, or "
            "move it away"
        )
    root.remove(unfinished_name(root, step_name(step)))
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
    folder.write(MANIFEST, [manifest_bytes(step, files)])
    if root.renames:
        root.rename(f"{step_name(step)}.tmp", step_name(step))


# -- the committed checkpoints ---------------------------------------------------------------------------------------------


def steps(root: Folder) -> list[int]:
    """The steps whose checkpoints were committed, oldest first.

    On a disk a checkpoint gets its name when it is complete: one without a manifest is damaged, not unfinished.
    """
    found = [step for name in root.names() if (step := step_of(name)) is not None]
    return sorted(step for step in found if root.renames or is_committed(root, step))


def unfinished_names(root: Folder) -> list[str]:
    """What interrupted saves and removals left, and checkpoints that were set aside."""
    committed = {step_name(step) for step in steps(root)}
    return [name for name in root.names() if name.startswith("step-") and name not in committed]


def select(root: Folder, committed: list[int], wanted: int | None) -> list[int]:
    """The ``committed`` steps of a folder, or only the ``wanted`` one; an error if there is none."""
    if not committed:
        raise ValueError(
            f"there is no checkpoint in {root}; give a step-N, or the folder set as `folder` in [checkpoints] of the run config"
        )
    if wanted is not None and wanted not in committed:
        raise ValueError(
            f"there is no {step_name(wanted)} in {root}; it has {', '.join(map(step_name, committed))}"
        )
    return committed if wanted is None else [wanted]


def newest_valid(
    committed: list[int], find_damage: Callable[[int], list[str]]
) -> tuple[int | None, dict[int, list[str]]]:
    """The newest undamaged step, and the damage of the newer ones."""
    damaged: dict[int, list[str]] = {}
    for step in sorted(committed, reverse=True):
        damage = find_damage(step)
        if not damage:
            return step, damaged
        damaged[step] = damage
    return None, damaged


def outdated(committed: list[int], keep: int, saved: int) -> list[int]:
    """The steps to remove so that the ``keep`` newest remain, and always the one just ``saved``.

    Example:
        >>> outdated([100, 200, 300, 400], keep=3, saved=400)
        [100]
        >>> outdated([100, 150, 300, 400], keep=2, saved=150)
        [100]
    """
    return [step for step in sorted(committed)[:-keep] if step != saved]


def remove(root: Folder, old: list[int]) -> None:
    """Remove checkpoints, the manifest first: an interrupted removal leaves no half of a valid checkpoint."""
    for step in old:
        root.child(step_name(step)).remove(MANIFEST)
        root.remove(step_name(step))


def set_aside(root: Folder, step: int, why: str) -> str:
    """Rename a checkpoint, so that its step can be saved again and it can be inspected; returns its new name."""
    taken = set(root.names())
    new = next(name for i in range(len(taken) + 1) if (name := f"{step_name(step)}.{why}-{i}") not in taken)
    root.rename(step_name(step), new)
    return new
