"""Which checkpoints there are, which is the newest that is whole, and which may go."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.checkpoint.commit import is_committed, step_name, step_of
from fourfold.checkpoint.folder import Folder
from fourfold.checkpoint.manifest import MANIFEST


def steps(root: Folder) -> list[int]:
    """The steps whose checkpoints were committed, oldest first.

    On a disk a checkpoint gets its name when it is whole: one that has lost its manifest is damaged, not unfinished.
    """
    found = [step for name in root.names() if (step := step_of(name)) is not None]
    return sorted(step for step in found if root.renames or is_committed(root, step))


def unfinished_names(root: Folder) -> list[str]:
    """What interrupted saves and interrupted removals have left, and what was set aside."""
    committed = {step_name(step) for step in steps(root)}
    return [name for name in root.names() if name.startswith("step-") and name not in committed]


def newest_valid(
    committed: list[int], find_damage: Callable[[int], list[str]]
) -> tuple[int | None, dict[int, list[str]]]:
    """The newest of the steps without damage, and the damage of those that are newer."""
    damaged: dict[int, list[str]] = {}
    for step in sorted(committed, reverse=True):
        damage = find_damage(step)
        if not damage:
            return step, damaged
        damaged[step] = damage
    return None, damaged


def outdated(committed: list[int], keep: int, saved: int) -> list[int]:
    """The steps to remove so that ``keep`` stay, the one just ``saved`` in any case.

    Example:
        >>> outdated([100, 200, 300, 400], keep=3, saved=400)
        [100]
        >>> outdated([100, 150, 300, 400], keep=2, saved=150)
        [100]
    """
    return [step for step in sorted(committed)[:-keep] if step != saved]


def remove(root: Folder, old: list[int]) -> None:
    """The manifest goes first: a removal that is interrupted leaves no checkpoint instead of half of one."""
    for step in old:
        root.child(step_name(step)).remove(MANIFEST)
        root.remove(step_name(step))


def set_aside(root: Folder, step: int, why: str) -> str:
    """Rename a checkpoint, so that its step can be saved again and somebody can look at it; its new name."""
    taken = set(root.names())
    new = next(name for i in range(len(taken) + 1) if (name := f"{step_name(step)}.{why}-{i}") not in taken)
    root.rename(step_name(step), new)
    return new
