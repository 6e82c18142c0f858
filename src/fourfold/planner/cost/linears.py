"""What the price of a block's linears depends on: their sizes, and the inputs of every timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from fourfold.planner.cost.collective import Kind
from fourfold.planner.cost.compute import Kernels
from fourfold.planner.inputs.cluster import Device, Slowdown
from fourfold.planner.inputs.experts import Owners
from fourfold.planner.inputs.layout import Schedule

Send = Callable[[Kind, str, float], float]  # (kind, axis, payload bytes) -> seconds
Sharding = Literal["tokens", "features", "whole"]  # over the second axis of an activation


class Given(NamedTuple):
    """The inputs of every timing of a step."""

    tokens: float
    y: int
    x: int
    device: Device
    kernels: Kernels
    schedule: Schedule
    slowdown: Slowdown
    send: Send
    by_tokens: bool = False  # sequence-parallel activations
    keep_inputs: bool = True  # or gather them again in backward, where activations are sequence-parallel
    owners: Owners | None = None  # of the experts of a mixture; None: they are gathered over z
    load: float = 1.0  # rows of the owner with most, as a multiple of the mean


class Linears(NamedTuple):
    """A group of linears that read one input; sizes are those of the matmul, that is, of the gathered input."""

    inputs: float
    outputs: tuple[float, ...]
    in_axis: str
    out_axis: str
    input_sharding: Sharding
    output_shardings: tuple[Sharding, ...]
    is_trained: bool = True  # or its weights are frozen
    adapter_rank: int = 0  # of LoRA, which each of them has then
    is_packed: bool = False  # its weights are in NF4: their numbers are made for each product
