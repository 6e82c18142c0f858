"""The events of one rank in a step, in order: operations, starts of collectives, and waits for them; and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Kind, Purpose

# What carries a collective, or a copy of a block's input to the host or back.
Track = Axis | Literal["host"]
Sent = Kind | Literal["to_host", "to_device"]
For = Purpose | Literal["offloading"]
Phase = Literal["forward", "recompute", "backward", "clip", "optimizer"]
Work = Literal["matmul", "attention", "memory"]
Category = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered weights",
    "communication buffers",
    "logits",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


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
    """A collective begins, or a copy between the device and the host."""

    phase: Phase
    module: str
    axis: Track
    kind: Sent
    purpose: For
    ranks: int
    payload_bytes: float
    # It begins when what started last on that axis is done, without the rank's waiting for it (`streams.py`).
    follows: Axis | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """What follows needs the result of a collective or a copy: the first that started with these fields and was not waited for."""

    phase: Phase
    module: str
    axis: Track
    kind: Sent
    purpose: For


Event = Operation | Start | Wait


@dataclass(frozen=True)
class Peak:
    """The most memory that tensors take in a step."""

    bytes: float
    by_category: Mapping[Category, float]
    event: int  # while this one runs


@dataclass(frozen=True)
class Trace:
    """The events of a step, and the memory that was taken (or given back, if negative) up to and with each of them."""

    events: Sequence[Event]
    # One more than events: what happens after the last.
    changes: Sequence[Sequence[tuple[Category, float]]]
    before: Mapping[Category, float]

    @cached_property
    def peak(self) -> Peak:
        """The highest sum on the way through the step."""
        now = {category: float(self.before.get(category, 0)) for category in CATEGORIES}
        total = sum(now.values())
        best = Peak(total, dict(now), 0)
        for event, of_event in enumerate(self.changes):
            for category, size in of_event:
                now[category] += size
                total += size
                if total > best.bytes:
                    best = Peak(total, dict(now), event)
        return best
