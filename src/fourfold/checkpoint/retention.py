"""Lists checkpoints, finds the newest valid one, removes old ones."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.checkpoint.commit import is_committed, step_name, step_of
from fourfold.checkpoint.folder import Folder
from fourfold.checkpoint.manifest import MANIFEST


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
