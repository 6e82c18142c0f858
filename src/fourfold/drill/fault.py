"""A fault as a value: what happens, to which rank, at which point of which step. It has a one-line text form."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

Action = Literal["kill", "stop", "slow", "nan", "spike", "flip", "eio", "enospc"]
# Where a fault can be injected. `instant`: N seconds after the run began, wherever the rank is then.
Point = Literal[
    "instant",
    "step",  # before the batch is processed
    "forward",  # in a module's forward; name: the module
    "collective",  # a collective has started and has not been waited for; name: "axis kind module"
    "gradients",  # after backward, before clipping
    "optimizer",  # before the optimizer's step
    "write",  # in the middle of writing a file of a checkpoint; name: the file
    "fsync",
    "rename",  # before it
    "renamed",  # after it
    "remove",
]
FILE_POINTS: tuple[Point, ...] = ("write", "fsync", "rename", "renamed", "remove")
# Actions that are possible only at some points.
ONLY_AT: dict[Action, tuple[Point, ...]] = {
    "nan": ("gradients",),
    "spike": ("gradients",),
    "flip": ("step", "optimizer"),
    "eio": ("write", "fsync", "rename"),
    "enospc": ("write",),
}


@dataclass(frozen=True)
class Fault:
    """One fault.

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
    # The step, counted from 1; saves belong to the step that they follow. 0: any step.
    step: int = 0
    # A shell pattern for the module, the collective or the file.
    name: str = "*"
    # The fault happens the nth time that all of this matches.
    nth: int = 1
    # slow: how long the rank sleeps, and in how many steps. instant: when.
    seconds: float = 0.0
    steps: int = 1
    # flip, nan: chooses the entry and the bit.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(
                f"{self.action!r} is not a fault that can be injected; use one of {', '.join(get_args(Action))}"
            )
        if self.at not in get_args(Point):
            raise ValueError(f"at={self.at} is not a point of a run; use one of {', '.join(get_args(Point))}")
        points = ONLY_AT.get(self.action, get_args(Point))
        if self.at not in points:
            raise ValueError(f"{self.action} cannot happen at={self.at}; use at={' or at='.join(points)}")
        if self.nth < 1 or self.steps < 1 or self.seconds < 0:
            raise ValueError(f"{self}: nth and steps have to be at least 1, seconds at least 0")

    def matches(self, at: Point, step: int, name: str) -> bool:
        """Does the fault belong to this point? The caller counts the matches."""
        in_time = self.step in (0, step) or (self.steps > 1 and self.step <= step < self.step + self.steps)
        return at == self.at and in_time and fnmatchcase(name, self.name)

    def __str__(self) -> str:
        options = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)[2:]
            if getattr(self, field.name) != field.default
        ]
        return ",".join([f"{self.action}:at={self.at}", *options])

    @staticmethod
    def parse(text: str) -> Fault:
        """The fault of a text such as ACTION:at=POINT,rank=R,step=S, as `str` writes it."""
        action, _, rest = text.strip().partition(":")
        kinds: dict[Any, Any] = {"int": int, "float": float}
        numbers = {field.name: kinds[field.type] for field in fields(Fault) if field.type in kinds}
        values: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if not equals or key not in {"at", "name", *numbers}:
                raise ValueError(
                    f"{part!r} of the fault {text!r} is not known; use at, rank, step, name, nth, seconds, steps or seed, "
                    "such as kill:at=fsync,rank=1,step=4"
                )
            if key in numbers and not re.fullmatch(r"\d+(\.\d+)?" if key == "seconds" else r"\d+", value):
                raise ValueError(f"{key}={value} of the fault {text!r} is not a number")
            values[key] = numbers.get(key, str)(value)
        return Fault(action, values.pop("at", "step"), **values)  # type: ignore[arg-type]
