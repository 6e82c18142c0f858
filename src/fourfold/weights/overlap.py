"""Which communication hides behind computation, and how much memory that may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

_MAX_CHUNKS = 4
STREAMED_OPTIONS = ("prefetch", "bundle_bytes", "keep_bytes", "gradients", "in_flight_bytes")
TOKEN_SHARDED_OPTIONS = ("keep_inputs",)


@dataclass(frozen=True)
class Overlap:
    """What is in flight while the rank computes. The results are the same whatever is set here.

    Example:
        >>> generous = Overlap(keep_bytes=2 * 1024**3)  # 2 GiB of weights wait for backward instead of coming twice
        >>> Overlap.none().prefetch
        0
    """

    # Streamed weights: how many weights are gathered ahead of the one in use.
    prefetch: int = 4
    # Streamed weights: blocks up to this size share one collective each way and stay until backward is over.
    bundle_bytes: int = 64 * 1024
    # Streamed weights: so many bytes stay gathered from forward to backward.
    keep_bytes: int = 0
    # Streamed weights: reduce-scatters over z and all-reduces over data go on until the end of backward,
    gradients: bool = True
    # but no more bytes of whole gradients than these wait for theirs; None: those of two blocks.
    in_flight_bytes: int | None = None
    # The sum of an input's gradient, behind the weight gradients of its siblings.
    backward: bool = True
    # The sum of an output, in this many parts of the tokens, each behind the next part's matmul.
    forward_chunks: int | Literal["auto"] = "auto"
    # Token-sharded activations: the gathered input of a linear stays until backward, instead of coming twice.
    keep_inputs: bool = True
    # The halves of this rank's sequences take turns, so that one computes while a sum or gather of the other's is in flight.
    interleave: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("prefetch", "bundle_bytes", "keep_bytes", "in_flight_bytes"):
            value = getattr(self, name)
            if value is None and name == "in_flight_bytes":
                continue
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"Overlap({name}={value!r}) is no whole number of at least 0; use one")
        if self.forward_chunks != "auto" and not isinstance(self.forward_chunks, int):
            raise ValueError(
                f"Overlap(forward_chunks={self.forward_chunks!r}) is not known; use a number of parts, or 'auto'"
            )
        if self.forward_chunks != "auto" and self.forward_chunks < 1:
            raise ValueError(
                f"Overlap(forward_chunks={self.forward_chunks}) makes no chunk; use 1 for the tokens in one piece, or 'auto'"
            )
        if self.interleave not in (True, False, "auto"):
            raise ValueError(
                f"Overlap(interleave={self.interleave!r}) is not known; use True, False or 'auto'"
            )

    def without_effect(self, names: Sequence[str]) -> str:
        """Of these settings, those that were changed, where none of them does anything; nothing if none was."""
        usual = Overlap()
        changed = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(usual, n)]
        return f"Overlap({', '.join(changed)}) has no effect" if changed else ""

    def chunks_of(self, output: Tensor, target: str) -> int:
        """In how many parts an output's all-reduce goes, on that kind of device."""
        if self.forward_chunks != "auto":
            return self.forward_chunks
        # A part should take longer to send than a collective takes to start: about 0.3 ms for Gloo, 20 us for NCCL.
        worthwhile_bytes = 16 * 2**20 if target == "cuda" else 2**20
        return max(1, min(_MAX_CHUNKS, output.numel() * output.element_size() // worthwhile_bytes))

    @staticmethod
    def none() -> Overlap:
        """Every collective is waited for where it starts."""
        return Overlap(prefetch=0, gradients=False, backward=False, forward_chunks=1, interleave=False)
