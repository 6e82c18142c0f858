"""Is the dry run the real thing, and is it small enough?

    python -m benchmarks.dryrun

Equality: on eight Gloo ranks, a training step's collectives, one by one in their order, against those of the dry run, on
five grids and with both kinds of weights; and the peak of what PyTorch's allocator handed out in that step, by its
profiler, against the predicted one, within 3 %. The same with sequence-parallel activations, on grids with x and y, with
gathered inputs that are kept and with such that come again.

Size: Llama-3.1-405B's configuration on 16,384 ranks and a dense model of 10^12 parameters on 131,072, each in a process of
its own on one core, in less than 60 s and 4 GB.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold.dry_run.events import Start
from fourfold.dry_run.run import dryrun
from fourfold.mesh.collectives import InFlightCollective
from fourfold.mesh.grid import Grid

RANKS = 8
GRIDS = ((1, 1, 2, 4), (2, 2, 1, 2), (1, 4, 2, 1), (8, 1, 1, 1), (1, 2, 2, 2))
# With sequence-parallel activations: (grid, are gathered inputs kept).
SEQUENCE_PARALLEL = (((1, 1, 2, 4), True), ((1, 1, 4, 2), False), ((1, 2, 2, 2), True), ((1, 2, 2, 2), False))
MEMORY_BAR = 0.03
STEPS = 4  # are measured
TIME_BAR_S, MEMORY_BAR_GB = 60, 4
SEQUENCES, LENGTH = 16, 128
Words = tuple[str, str, str, int, str]

LLAMA_405B = LlamaConfig(
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    vocab_size=128256,
)
DENSE_1T = LlamaConfig(
    hidden_size=25600,
    intermediate_size=68096,
    num_hidden_layers=128,
    num_attention_heads=160,
    num_key_value_heads=160,
    vocab_size=128256,
)
# name: (configuration, grid, global batch in sequences, their length)
SIZES: dict[str, tuple[LlamaConfig, tuple[int, int, int, int], int, int]] = {
    "405b": (LLAMA_405B, (64, 16, 2, 8), 2048, 8192),
    "1t": (DENSE_1T, (128, 16, 4, 16), 4096, 8192),
}


def small_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    )


def words_of(flight: InFlightCollective | Start) -> Words:
    return (flight.axis, flight.kind, flight.purpose, int(flight.payload_bytes), flight.module)


# -- the real thing ---------------------------------------------------------------------------------------------------


def real_step(
    shape: tuple[int, int, int, int],
    weights: Any,
    overlap: ff.Overlap,
    precision: Any,
    activations: Any,
    float8: Any = "none",
    sequence_ranks: int = 1,
    checkpointing: Any = "none",
) -> tuple[list[Words], int]:
    """A step's collectives, and the most memory that tensors took in it; every rank runs this."""
    grid = Grid.create(shape, sequence_ranks=sequence_ranks, timeout_s=60)
    with torch.device("meta"):
        model = LlamaForCausalLM(small_config())
    ff.parallelize(
        model,
        grid,
        weights=weights,
        precision=precision,
        activations=activations,
        overlap=overlap,
        float8=float8,
        activation_checkpointing=checkpointing,
    )
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-4, foreach=False)
    rows = grid.local_rows(SEQUENCES)
    ids = torch.zeros(rows.stop - rows.start, LENGTH, dtype=torch.int64)
    inputs = (
        ff.cut_sequences(ids, grid, labels=ids) if sequence_ranks > 1 else {"input_ids": ids, "labels": ids}
    )

    def step() -> None:
        model(**inputs).loss.backward()
        ff.clip_grad_norm_(model.parameters(), 1.0, grid)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    before = live_bytes(model, optimizer, *inputs.values())
    peaks = []
    for _ in range(STEPS):
        with (
            grid.collectives.recording() as flights,
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            step()
        dist.barrier()
        peaks.append(before + highest_bytes(profiler))
    return [words_of(flight) for flight in flights], min(peaks)


def live_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> int:
    """Bytes of all tensors that stay from step to step."""
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    tensors += [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def highest_bytes(profiler: profile) -> int:
    """How far the sum of what the allocator gave and took back rose."""
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    )
    now = highest = 0
    for _, size in changes:
        now += size
        highest = max(highest, now)
    return highest


def compare(
    pool: RankPool,
    shape: tuple[int, int, int, int],
    weights: Any,
    precision: Any = "fp32",
    activations: Any = "replicated",
    keep_inputs: bool = True,
    float8: Any = "none",
    sequence_ranks: int = 1,
    checkpointing: Any = "none",
) -> tuple[bool, float]:
    """(are the collectives the same, by how much the predicted peak is off), on rank 0."""
    in_turns, in_one_piece = (ff.Overlap(interleave=i, keep_inputs=keep_inputs) for i in (True, False))

    def dry(overlap: ff.Overlap) -> Any:
        return dryrun(
            small_config(),
            shape,
            sequences=SEQUENCES,
            length=LENGTH,
            precision=precision,
            activations=activations,
            weights=weights,
            overlap=overlap,
            float8=float8,
            target="cpu",
            sequence_ranks=sequence_ranks,
            activation_checkpointing=checkpointing,
        )

    def real(overlap: ff.Overlap) -> list[tuple[list[Words], int]]:
        given = (shape, weights, overlap, precision, activations, float8, sequence_ranks, checkpointing)
        return pool.run(real_step, math.prod(shape), *given)

    # Memory of a batch in one piece: the profiler does not see the threads of an interleaved one.
    ran, foreseen = real(in_one_piece), dry(in_one_piece)
    # Gloo's threads let go of a tensor some time after it was sent, by chance: of steps and ranks that do the same, the least.
    # Of ranks that share sequences the first has the last chunk, which needs all keys.
    alike = ran if sequence_ranks == 1 else ran[:1]
    off = foreseen.peak.bytes / min(held for _, held in alike) - 1
    if weights == "streamed":  # FSDP2 takes a batch in one piece in any case
        ran, foreseen = real(in_turns), dry(in_turns)
    sent, predicted = ran[0][0], [words_of(start) for start in foreseen.collectives]
    if weights == "fsdp2":  # it does not say for which module
        sent, predicted = [w[:4] for w in sent], [w[:4] for w in predicted]
    return sent == predicted, off


# -- size ---------------------------------------------------------------------------------------------------------------


def measure_size(name: str) -> tuple[float, float, str]:
    """Seconds and GB of a dry run in a process of its own, on one core, and what it printed."""
    command = [sys.executable, "-m", "benchmarks.dryrun", "--size", name]
    start_s = time.perf_counter()
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    taken_s = time.perf_counter() - start_s
    peak_kb = int(done.stdout.rsplit("peak_kb", 1)[1])
    return taken_s, peak_kb * 1024 / 1e9, done.stdout.rsplit("peak_kb", 1)[0]


def run_size(name: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config, shape, sequences, length = SIZES[name]
    result = dryrun(
        config,
        shape,
        sequences=sequences,
        length=length,
        activation_checkpointing="full",
    )
    print(result)
    print("peak_kb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    options = parser.parse_args(arguments)
    if options.size:
        run_size(options.size)
        return 0
    failed = []
    with RankPool(RANKS, quiet=True) as pool:
        rows: list[tuple[Any, str, bool]] = [(shape, "replicated", True) for shape in GRIDS]
        rows += [(shape, "sequence-parallel", keep) for shape, keep in SEQUENCE_PARALLEL]
        for shape, activations, keep_inputs in rows:
            for weights in ("streamed", "fsdp2"):
                same, off = compare(pool, shape, weights, "fp32", activations, keep_inputs)
                name = f"{shape!s:14} {weights:9} {activations}{'' if keep_inputs else ', gathered again'}"
                print(f"{name:54} collectives {'equal' if same else 'DIFFER'}, peak {off:+.2%}", flush=True)
                if not same or abs(off) > MEMORY_BAR:
                    failed.append(name)
    for name in options.sizes:
        taken_s, gb, said = measure_size(name)
        shape = SIZES[name][1]
        print(said)
        print(
            f"{name} on {shape}: {taken_s:.1f} s of {TIME_BAR_S}, {gb:.2f} GB of {MEMORY_BAR_GB}", flush=True
        )
        if taken_s > TIME_BAR_S or gb > MEMORY_BAR_GB:
            failed.append(name)
    print(f"dryrun: {len(failed)} past their bars {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
