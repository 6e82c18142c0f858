"""The events of one rank in a step, in order: operations, starts of collectives, and waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fourfold.dry_run.memory import Category
from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Kind, Purpose

Phase = Literal["forward", "recompute", "backward", "clip", "optimizer"]
Work = Literal["matmul", "attention", "memory"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of PyTorch; a view is not an operation."""

    phase: Phase
    module: str
    name: str
    work: Work
    flops: float
    bytes_moved: float
    # (batch, m, n, k) of a matmul; the output's shape of any other operator.
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """A collective begins."""

    phase: Phase
    module: str
    axis: Axis
    kind: Kind
    purpose: Purpose
    ranks: int
    payload_bytes: float
    # It begins when what started last on that axis is done, without the rank's waiting for it (`streams.py`).
    follows: Axis | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """What follows needs the result of a collective: the first that started with these fields and was not waited for."""

    phase: Phase
    module: str
    axis: Axis
    kind: Kind
    purpose: Purpose


Event = Operation | Start | Wait


@dataclass(frozen=True)
class Trace:
    """The events of a step, and the memory that was taken (or given back, if negative) up to and with each of them."""

    events: Sequence[Event]
    # One more than events: what happens after the last.
    changes: Sequence[Sequence[tuple[Category, float]]]
    before: Mapping[Category, float]
