"""Steps of a small reference model through the engine, with collectives that cost nothing: what Python and memory take.

Single operators do not add up to a step of the engine: there are hooks, autograd, the change of lanes, memory that is
mapped. So the very engine runs a small model on a few grids, on real tensors, under a back end that takes every collective
for done, and each phase is timed. `calibrate` explains these times by the operators that a dry run lists.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fourfold.dry_run.events import Operation, Start
from fourfold.dry_run.run import dryrun
from fourfold.dry_run.world import fake_grid
from fourfold.optim.clip import clip_grad_norm_
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.parallelize import parallelize

_TARGET = "cpu"  # a GPU's kernels are launched ahead, and their times do not add up with Python's
PHASES = ("forward", "backward", "clip", "optimizer")
_WARM_UP, _STEPS = 2, 4


@dataclass(frozen=True)
class Case:
    """A reference step: its grid, as one of its ranks sees it, and its batch."""

    shape: tuple[int, int, int, int]
    sequences: int  # of a rank
    length: int
    hidden: int = 256
    layers: int = 2
    vocabulary: int = 1024

    @property
    def global_sequences(self) -> int:
        return self.sequences * self.shape[0] * self.shape[1]

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=max(2, self.hidden // 64),
            num_key_value_heads=max(2, self.hidden // 64),
            vocab_size=self.vocabulary,
            attn_implementation="sdpa",
        )


# Each axis once, with work that is all overhead and with work that is mostly memory.
CASES = tuple(
    Case(shape, 2, length, hidden)
    for shape in ((1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))
    for length, hidden in ((16, 128), (256, 384))
)


@dataclass(frozen=True)
class Listed:
    """What a dry run lists for one phase of a case."""

    operations: tuple[Operation, ...]
    starts: int


def list_phases(case: Case) -> dict[str, Listed]:
    run = dryrun(
        case.config(),
        case.shape,
        sequences=case.global_sequences,
        length=case.length,
        precision="fp32",
        weights="streamed",
        target=_TARGET,
    )
    return {
        phase: Listed(
            tuple(o for o in run.operations if o.phase == phase),
            sum(isinstance(e, Start) and e.phase == phase for e in run.trace.events),
        )
        for phase in PHASES
    }


def time_phases(case: Case, meet: Callable[[], None]) -> dict[str, float]:
    """Seconds of a core for each phase on this rank, the median of some steps; ranks begin together at ``meet``."""
    from transformers import AutoModelForCausalLM

    with fake_grid(case.shape, target=_TARGET) as grid:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(case.config())
        parallelize(model, grid, seed=0, weights="streamed", precision="fp32")
        optimizer = sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-4, foreach=False)
        ids = torch.zeros(case.sequences, case.length, dtype=torch.int64)
        seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for step in range(_WARM_UP + _STEPS):
            if step >= _WARM_UP:
                meet()
            marks = [time.process_time()]
            loss = model(input_ids=ids, labels=ids).loss
            marks.append(time.process_time())
            loss.backward()
            marks.append(time.process_time())
            clip_grad_norm_(model.parameters(), 1.0, grid)
            marks.append(time.process_time())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.process_time())
            for phase, start, end in zip(PHASES, marks, marks[1:], strict=False):
                if step >= _WARM_UP:
                    seconds[phase].append(end - start)
    return {phase: statistics.median(values) for phase, values in seconds.items()}
