"""How the benchmarks measure: side by side, interleaved, in one run.

Every figure is a ratio of medians of times that were taken in turns, round after round, so that what the machine does
besides hits all alike. Ranks meet before each time is taken; a step takes as long as its slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from fourfold.mesh.grid import Grid

ROUNDS = 7  # odd, so that the median is a time that was measured


@dataclass(frozen=True)
class Times:
    """Seconds of one way to do it, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range between the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median_s

    def __str__(self) -> str:
        return f"{self.median_s:.3f} s ±{self.spread:.1%}"


def ratio(ours: Times, theirs: Times) -> float:
    """The median over the rounds of ours / theirs, each from one round: what drifts slowly cancels."""
    return statistics.median(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))


def interleaved(ways: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Times]:
    """Time each way once in every round; the slowest rank counts. Call on all ranks, warmed up before."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        # Each round begins with another one, so that nobody always follows the same.
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(timed(ways[name]))
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the slowest rank has done it."""
    dist.barrier()
    start_s = time.perf_counter()
    work()
    taken_s = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(taken_s, dist.ReduceOp.MAX)
    return float(taken_s)


# -- the model ----------------------------------------------------------------------------------------------------------


def llama(
    hidden: int = 512, layers: int = 6, heads: int = 8, vocabulary: int = 2048, kv_heads: int | None = None
) -> LlamaConfig:
    """Llama's proportions, at a size for CPUs."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        vocab_size=vocabulary,
        attn_implementation="sdpa",
    )


def batch(config: LlamaConfig, sequences: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (sequences, length), generator=generator)


def build(config: LlamaConfig, grid: Grid, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ff.parallelize(model, grid, seed=0, **options)
    return model


def stepper(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    """Forward and backward; the optimizer sends nothing."""

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    return step
