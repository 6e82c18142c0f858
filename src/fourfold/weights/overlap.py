"""Settings: which communication overlaps with computation, and how much memory that may use.

Does not import torch: the planner's formulas need the chunks, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MOST_CHUNKS = 4
# Sending a chunk should take longer than starting a collective: about 0.3 ms for Gloo, 20 us for NCCL.
CHUNK_BYTES = {"cpu": 2**20, "cuda": 16 * 2**20}
# And on GPUs so should the matmul that hides it: about 60 us of an H100. On CPUs any matmul is long enough.
CHUNK_OPERATIONS = {"cpu": 1.0, "cuda": 4e10}
STREAMED_OPTIONS = ("prefetch", "bundle_bytes", "keep_bytes", "gradients", "in_flight_bytes")
SEQUENCE_PARALLEL_OPTIONS = ("keep_inputs",)


@dataclass(frozen=True)
class Overlap:
    """Which collectives are in flight while the rank computes. These settings do not change the results.

    Example:
        >>> generous = Overlap(keep_bytes=2 * 1024**3)  # 2 GiB of weights are not gathered again in backward
        >>> Overlap.none().prefetch
        0
    """

    # Streamed weights: the number of weights that are gathered ahead of the one in use.
    prefetch: int = 4
    # Streamed weights: weights up to this size share one gather and one scatter, and stay until the end of backward.
    bundle_bytes: int = 64 * 1024
    # Streamed weights: this many bytes stay gathered from forward to backward.
    keep_bytes: int = 0
    # Streamed weights: reduce-scatters over z and all-reduces over data may run until the end of backward.
    gradients: bool = True
    # Streamed weights: limit on the bytes of unsharded gradients in flight; None: the size of two blocks.
    in_flight_bytes: int | None = None
    # The sum of an input's gradient overlaps with the weight gradients of the linears that read the input.
    backward: bool = True
    # The sum of an output is split into this many chunks of tokens; each overlaps with the next chunk's matmul.
    forward_chunks: int | Literal["auto"] = "auto"
    # Sequence-parallel activations: keep the gathered input of a linear until backward, instead of gathering it again.
    keep_inputs: bool = True
    # Batch-split overlap: two half-batches alternate, so that one computes while a collective of the other is in flight.
    interleave: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("prefetch", "bundle_bytes", "keep_bytes", "in_flight_bytes"):
            value = getattr(self, name)
            if value is None and name == "in_flight_bytes":
                continue
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"Overlap({name}={value!r}) is not an integer of at least 0; use one")
        chunks = self.forward_chunks
        if chunks != "auto" and (not isinstance(chunks, int) or chunks < 1):
            raise ValueError(
                f"Overlap(forward_chunks={chunks!r}) is not a number of at least 1; use 1 for no split, or 'auto'"
            )
        if self.interleave not in (True, False, "auto"):
            raise ValueError(
                f"Overlap(interleave={self.interleave!r}) is not supported; use True, False or 'auto'"
            )

    def without_effect(self, names: Sequence[str]) -> str:
        """A note that names those of the settings ``names`` that were changed but have no effect; empty if none was changed."""
        default = Overlap()
        changed = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(default, n)]
        return f"Overlap({', '.join(changed)}) has no effect" if changed else ""

    def chunks_of(self, elements: float, each_bytes: int, features: int, target: str) -> int:
        """The number of chunks of an output's sum on this device type; each element is a product of so many features."""
        if self.forward_chunks != "auto":
            return self.forward_chunks
        by_bytes = elements * each_bytes / CHUNK_BYTES[target]
        by_operations = 2 * elements * features / CHUNK_OPERATIONS[target]
        return int(max(1, min(MOST_CHUNKS, by_bytes, by_operations)))

    @staticmethod
    def none() -> Overlap:
        """No overlap: every collective is waited for where it starts, except for the count of labels."""
        return Overlap(prefetch=0, gradients=False, backward=False, forward_chunks=1, interleave=False)
