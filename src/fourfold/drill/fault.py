"""A fault as a value: what happens, to which rank, at which point of which step. One line of text says all of it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

Action = Literal["kill", "stop", "slow", "nan", "spike", "flip", "eio", "enospc"]
# Where a rank can be met. `instant`: so many seconds after the run began, wherever it is then.
Point = Literal[
    "instant",
    "step",  # before the batch's work
    "forward",  # in a module's forward; name: the module
    "collective",  # a collective has started, and is not waited for yet; name: "axis kind module"
    "gradients",  # backward is over, nothing is clipped yet
    "optimizer",  # before the optimizer's step
    "write",  # in the middle of writing a file of a checkpoint; name: the file
    "fsync",
    "rename",  # before it
    "renamed",  # after it
    "remove",
]
FILE_POINTS: tuple[Point, ...] = ("write", "fsync", "rename", "renamed", "remove")
# What can only happen where there is something of the kind.
ONLY_AT: dict[Action, tuple[Point, ...]] = {
    "nan": ("gradients",),
    "spike": ("gradients",),
    "flip": ("step", "optimizer"),
    "eio": ("write", "fsync", "rename"),
    "enospc": ("write",),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Example:
        >>> fault = Fault("kill", "fsync", rank=1, step=4, name="manifest.json")
        >>> str(fault)
        'kill:at=fsync,rank=1,step=4,name=manifest.json'
        >>> Fault.parse(str(fault)) == fault
        True
    """

    action: Action
    at: Point
    rank: int = 0
    # In this step, counted from 1; saves belong to the step that they follow. 0: in any.
    step: int = 0
    # A pattern of shells for the module, the collective or the file.
    name: str = "*"
    # The how manyth time that all of this is met.
    nth: int = 1
    # slow: how long it sleeps, and in how many steps. instant: when.
    seconds: float = 0.0
    steps: int = 1
    # flip, nan: which number and which bit follow from it.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(
                f"{self.action!r} is no fault that can be planted; use one of {', '.join(get_args(Action))}"
            )
        if self.at not in get_args(Point):
            raise ValueError(f"at={self.at} is no point of a run; use one of {', '.join(get_args(Point))}")
        points = ONLY_AT.get(self.action, get_args(Point))
        if self.at not in points:
            raise ValueError(f"{self.action} cannot happen at={self.at}; use at={' or at='.join(points)}")
        if self.nth < 1 or self.steps < 1 or self.seconds < 0:
            raise ValueError(f"{self}: nth and steps begin with 1, seconds with 0")

    def matches(self, at: Point, step: int, name: str) -> bool:
        """Is this the place? Who asks counts how often it was."""
        in_time = self.step in (0, step) or (self.steps > 1 and self.step <= step < self.step + self.steps)
        return at == self.at and in_time and fnmatchcase(name, self.name)

    def __str__(self) -> str:
        usual = Fault(self.action, self.at) if self.action in get_args(Action) else self
        options = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in ("action", "at") and getattr(self, field.name) != getattr(usual, field.name)
        ]
        return ",".join([f"{self.action}:at={self.at}", *options])

    @staticmethod
    def parse(text: str) -> Fault:
        """What `str` wrote, or a person: ACTION:at=POINT,rank=R,step=S and so on."""
        action, _, rest = text.strip().partition(":")
        kinds: dict[str, Any] = {
            "rank": int,
            "step": int,
            "nth": int,
            "steps": int,
            "seed": int,
            "seconds": float,
        }
        values: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if not equals or key not in {"at", "name", *kinds}:
                raise ValueError(
                    f"{part!r} of the fault {text!r} is not known; write at, rank, step, name, nth, seconds, steps or seed, "
                    "such as kill:at=fsync,rank=1,step=4"
                )
            if key in kinds and not re.fullmatch(r"\d+(\.\d+)?" if key == "seconds" else r"\d+", value):
                raise ValueError(f"{key}={value} of the fault {text!r} is no number")
            values[key] = kinds.get(key, str)(value)
        return Fault(action, values.pop("at", "step"), **values)  # type: ignore[arg-type]


# What a save on a disk goes through, in the order of rank 0; a pattern for the files of all ranks.
SAVE_POINTS: tuple[tuple[Point, str], ...] = (
    ("write", "rank-*.safetensors"),
    ("fsync", "rank-*.safetensors"),
    ("write", "index.json"),
    ("fsync", "index.json"),
    ("write", "state.json"),
    ("fsync", "state.json"),
    ("write", "manifest.json"),
    ("fsync", "manifest.json"),
    ("fsync", "step-*.tmp"),
    ("rename", "step-*.tmp"),
    ("renamed", "step-*.tmp"),
)


def random_kill(seed: int, ranks: int, steps: int, saves: Sequence[int], run_s: float) -> Fault:
    """A rank killed anywhere: at an instant, at a point of a step, or in a save. The same seed gives the same fault.

    Example:
        >>> random_kill(7, ranks=4, steps=12, saves=[4, 8, 12], run_s=3.0) == random_kill(7, 4, 12, [4, 8, 12], 3.0)
        True
    """
    choose = random.Random(seed)
    rank, step = choose.randrange(ranks), choose.randint(1, steps)
    where = choose.choice(
        ["instant", "step", "forward", "collective", "gradients", "optimizer", "save", "save"]
    )
    if where == "instant":
        return Fault("kill", "instant", rank, seconds=round(choose.uniform(0, run_s), 3))
    if where == "save" and saves:
        point, name = choose.choice(SAVE_POINTS)
        # The other ranks write a file of their own, and nothing else.
        return Fault("kill", point, rank if name.startswith("rank") else 0, choose.choice(saves), name)
    fault = Fault("kill", "step", rank, step)
    if where in ("forward", "collective"):
        return replace(fault, at=where, nth=choose.randint(1, 8))  # type: ignore[arg-type]
    return replace(fault, at="optimizer" if where == "save" else where)  # type: ignore[arg-type]
