"""A layout: a grid, how the batch goes through it, and what is kept; and the schedule by which software runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fourfold.mesh.axes import Axis
from fourfold.parallel.checkpointing import ActivationCheckpointing, by_blocks, weaker

Activations = Literal["replicated", "sequence-parallel"]
Accumulation = Literal["whole", "sharded"]
Attention = Literal["auto", "varlen", "flex", "masked"]
Elementwise = Literal["fused", "eager", "compiled"]
# Experts of a mixture: cut over y and x, and gathered over z; or owned by the ranks of these axes.
ExpertsLayout = Literal["cut"] | tuple[Axis, ...]
# What a plan tries: all that ranks can do (`parallel/experts/choice.py`).
EXPERTS: tuple[ExpertsLayout, ...] = ("cut", ("z",), ("x",), ("z", "x"))
ACCUMULATION: tuple[Accumulation, ...] = get_args(Accumulation)


def undivided_axis(length: int, y: int, x: int) -> tuple[str, int] | None:
    """The tensor axis, with its ranks, that does not divide a sequence, so that tokens cannot be sharded; None if both do.

    The tokens of every batch of a run have to divide, also of a last one with fewer sequences: so those of a sequence.

    Example:
        >>> undivided_axis(1024, 2, 3)
        ('x', 3)
    """
    return next(((axis, ranks) for axis, ranks in (("x", x), ("y", y)) if length % ranks), None)


@dataclass(frozen=True)
class Layout:
    """The sizes of the four axes, and what else a plan decides."""

    data: int
    z: int
    y: int
    x: int
    micro_batches: int = 1
    activation_checkpointing: ActivationCheckpointing = "none"
    keep_bytes: int = 0  # of gathered weights that are kept for backward instead of gathered twice
    weights: Literal["fsdp2", "streamed"] = "fsdp2"
    # Activations on the ranks of the second tensor axis: replicated, or sharded by tokens.
    activations: Activations = "replicated"
    keep_inputs: bool = True  # with sequence-parallel activations: gathered inputs are kept for backward instead of gathered twice
    # Blocks, from the first, with that checkpointing; the others have the next weaker kind. None: all.
    checkpointed_blocks: int | None = None
    # Gradients of several micro-batches: whole on each z rank and reduced once, or reduced over z in each of them.
    accumulation: Accumulation = "whole"
    # The inputs of recomputed blocks are in the memory of the host from forward to backward; for GPUs.
    activation_offloading: bool = False
    experts: ExpertsLayout = "cut"
    sequence_ranks: int = 1  # neighbours along z that share sequences

    def __post_init__(self) -> None:
        if isinstance(self.experts, list):  # as a file has it
            object.__setattr__(self, "experts", tuple(self.experts))

    @property
    def ranks(self) -> int:
        return self.data * self.z * self.y * self.x

    @property
    def grid(self) -> tuple[int, int, int, int]:
        return (self.data, self.z, self.y, self.x)

    @property
    def accumulates_shards(self) -> bool:
        return self.micro_batches > 1 and self.accumulation == "sharded"

    @property
    def by_tokens(self) -> bool:
        return self.activations == "sequence-parallel"

    def checkpointing_of(self, blocks: int) -> list[tuple[ActivationCheckpointing, int]]:
        """(kind, number of blocks), from the first block to the last."""
        return by_blocks(self.activation_checkpointing, self.checkpointed_blocks, blocks)

    @property
    def checkpointing_words(self) -> str:
        """Empty if nothing is recomputed."""
        words = {"none": "", "selective": "partly recomputed", "full": "recomputed"}
        kind, count = self.activation_checkpointing, self.checkpointed_blocks
        if count is None or kind == "none":
            return words[kind]
        rest = words[weaker(kind)]
        return f"{count} blocks {words[kind]}" + (f", the others {rest}" if rest else "")

    @property
    def extras(self) -> str:
        """The settings in addition to the grid, in words; empty if all are defaults."""
        settings = {
            f"{self.sequence_ranks} ranks a sequence": self.sequence_ranks > 1,
            f"{self.micro_batches} micro-batches": self.micro_batches > 1,
            "sharded gradients": self.accumulates_shards,
            "sequence-parallel": self.by_tokens,
            "re-gathered": self.by_tokens and not self.keep_inputs,
            self.checkpointing_words: self.checkpointing_words != "",
            "inputs offloaded": self.activation_offloading and self.checkpointing_words != "",
            f"{self.keep_bytes / 2**30:.1f} GiB kept": self.keep_bytes > 0,
            f"experts owned over {' and '.join(self.experts)}": self.experts != "cut",
        }
        return ", ".join(words for words, is_set in settings.items() if is_set)

    def __str__(self) -> str:
        grid = f"(data={self.data}, z={self.z}, y={self.y}, x={self.x})"
        return f"{grid}, {self.extras}" if self.extras else grid


@dataclass(frozen=True)
class Schedule:
    """What overlaps with what, in which precision. The defaults are Fourfold's on CUDA except for fused
    kernels, which it leaves to the model; others describe other software."""

    weight_bytes: int = 2  # an element of a gathered weight, and of an activation
    gradient_bytes: int = 4  # an element of a gradient on the wire
    data_bytes: int | None = None  # the same over data, where it is another
    # Gradients are reduced with each micro-batch, not with the last alone.
    sends_every_micro_batch: bool = False
    gathers_ahead: bool = True
    hides_scatters: bool = True
    hides_data: bool = True  # the all-reduce over data overlaps backward
    hides_backward: bool = True  # the all-reduce of an input's gradient overlaps the weight gradients
    # The sum of an output is in chunks for this device type, each while the next is multiplied; None: it is in one piece.
    chunks_for: Literal["cpu", "cuda"] | None = "cuda"
    # Batch-split overlap: one half-batch computes while the other's all-reduce is in flight.
    interleaves: bool = False
    attention: Literal["flash", "plain"] = "flash"
    # Sequence parallelism: norms and residuals are not repeated on every x rank.
    cuts_tokens_over_x: bool = False
    optimizer_over_data: bool = False  # ZeRO-1: the optimizer's states are sharded over data as well
    stops_early: bool = (
        False  # a recomputed forward ends before its last linear, whose output backward does not need
    )
    fused_optimizer: bool = True  # AdamW in one pass over the parameters
    float8: bool = False  # outputs of linears in blocks, and gradients of their inputs, are products in e4m3
    # One kernel for what is between matmuls, one for each operator, or those of Inductor.
    elementwise: Elementwise = "fused"


FOURFOLD = Schedule(elementwise="eager", stops_early=True)
