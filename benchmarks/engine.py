"""What does the engine cost, and what does it win, against PyTorch's own parts?

Training steps (forward, backward, AdamW) of one Llama, fp32, each pair in turns in one run:

    a  grid (1,1,1,1) against the stock model in one process                                 at most 1.03
    b  x = 2 against `parallelize_module` with `loss_parallel`                               at most 0.95
    c  z = 2 with fsdp2 weights against bare `fully_shard`                                   at most 1.02
    d  z = 2 and z = 4, streamed weights against `fully_shard` with prefetch: on one host    at most 1.02
                                                            between two emulated hosts       at most 0.90

Between two hosts the rate of the links is that at which the communication of the step alone takes as long as its
computation alone. `fully_shard` is also shown tuned beyond what PyTorch has (`benchmarks.baseline`, overlap), without a threshold.

With `--compare-to` this version and another checkout, which has its own environment in `.ci/venv`, take steps in turns:
how long does ours take, relative to theirs? (`benchmarks.versions`)

    python -m benchmarks.engine
    python -m benchmarks.engine --only b d
    python -m benchmarks.engine --compare-to ../older
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from benchmarks import baseline, versions
from benchmarks.cluster import Cluster, why_not
from benchmarks.measure import (
    ROUNDS,
    Times,
    balance,
    batch,
    build,
    end_rank,
    interleaved,
    llama,
    ratio,
    record,
    replay,
    save,
    sent_bytes,
    silent,
    timed,
)
from benchmarks.ranks import RankPool
from fourfold.mesh.grid import Grid

LEARNING_RATE = 1e-4
SIZES = ("rounds", "hidden", "layers", "sequences", "length")
# part: (ranks, hosts, threshold, what it is)
PARTS = {
    "a": (1, 1, 1.03, "grid (1,1,1,1) / stock model"),
    "b": (2, 1, 0.95, "x = 2 / parallelize_module"),
    "c": (2, 1, 1.02, "z = 2, fsdp2 / bare fully_shard"),
    "d-z2": (2, 1, 1.02, "z = 2, streamed / fully_shard with prefetch, one host"),
    "d-z4": (4, 1, 1.02, "z = 4, streamed / fully_shard with prefetch, one host"),
    "d-z2-hosts": (2, 2, 0.90, "z = 2, streamed / fully_shard with prefetch, two hosts"),
    "d-z4-hosts": (4, 2, 0.90, "z = 4, streamed / fully_shard with prefetch, two hosts"),
}


def ours(config: LlamaConfig, grid: Grid, ids: Tensor, **options: Any) -> Callable[[], None]:
    model = build(config, grid, **options)
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=LEARNING_RATE, fused=True)
    ids = ids[grid.local_rows(len(ids))]

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def stock(config: LlamaConfig, ids: Tensor) -> Callable[[], None]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    return _plain(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True), ids)


def bare_fully_shard(config: LlamaConfig, ids: Tensor) -> Callable[[], None]:
    """As PyTorch's documentation has it: each layer, then the model. AdamW on the DTensors' local parts, as ours."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=LEARNING_RATE, fused=True)
    rows = len(ids) // mesh.size()
    return _plain(model, optimizer, ids[mesh.get_local_rank() * rows :][:rows])


def opponent(config: LlamaConfig, layout: baseline.Layout, ids: Tensor, **options: Any) -> Callable[[], None]:
    built = baseline.build(config, layout, optimizer={"fused": True, "lr": LEARNING_RATE}, **options)
    ids = ids[built.local_rows(len(ids))]

    def step() -> None:
        built.step(ids, ids)
        built.optimizer_step()

    return step


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(part: str, config: LlamaConfig, sequences: int, length: int, rounds: int) -> dict[str, Any]:
    """The times of both sides of a part; every rank runs this."""
    ranks, hosts, _, _ = PARTS[part]
    ids = batch(config, sequences, length)
    ways: dict[str, Callable[[], None]] = {}
    grid = Grid.create((1, ranks, 1, 1) if part[0] in "cd" else (1, 1, 1, ranks), timeout_s=600)
    if part == "a":
        ways = {"ours": ours(config, grid, ids), "theirs": stock(config, ids)}
    elif part == "b":
        ways = {
            "ours": ours(config, grid, ids),
            "theirs": opponent(config, baseline.Layout(1, 1, ranks), ids),
        }
    elif part == "c":
        ways = {"ours": ours(config, grid, ids, weights="fsdp2"), "theirs": bare_fully_shard(config, ids)}
    else:
        layout = baseline.Layout(1, ranks, 1)
        ways = {
            "ours": ours(config, grid, ids, weights="streamed"),
            "theirs": opponent(config, layout, ids, overlap=False),
            "tuned": opponent(config, layout, ids, overlap=True),
        }
    for step in ways.values():
        for _ in range(3):
            step()
    result: dict[str, Any] = {}
    if hosts > 1:
        result["mbit"] = balance_links(ways["ours"], grid, hosts)
    times = interleaved(ways, rounds)
    return {**result, "times": {name: t.seconds for name, t in times.items()}}


def balance_links(step: Callable[[], None], grid: Grid, hosts: int) -> float:
    """Set the rate of the links, in Mbit/s, at which the communication of a step takes as long as its computation."""

    def compute() -> None:
        with silent():
            step()

    flights = record(step, grid)
    compute_s = statistics.median(timed(compute) for _ in range(3))
    first_mbit = sent_bytes(flights, grid) * 8 * dist.get_world_size() / hosts / compute_s / 1e6
    return balance(compute_s, replay(flights, grid), first_mbit)


def show(part: str, result: dict[str, Any]) -> bool:
    """Print a part; is it within its threshold?"""
    _, _, bar, what = PARTS[part]
    times = {name: Times(tuple(seconds)) for name, seconds in result["times"].items()}
    reached = ratio(times["ours"], times["theirs"])
    tuned = f", against it tuned {ratio(times['ours'], times['tuned']):.3f}" if "tuned" in times else ""
    rate = f", {result['mbit']:.0f} Mbit/s" if "mbit" in result else ""
    verdict = "" if reached <= bar else "   FAILED"
    print(
        f"{part[0]}  {what:56} {reached:.3f} (at most {bar:.2f}); ours {times['ours']}, theirs {times['theirs']}{tuned}{rate}"
        f"{verdict}",
        flush=True,
    )
    return reached <= bar


def compare(folder: Path, parts: Sequence[str], sizes: Sequence[int], rounds: int) -> int:
    """Take steps of each part by both versions in turns; returns how many parts have become slower, by the median."""
    slower = 0
    for part in parts:
        ranks, hosts, _, _ = PARTS[part]
        compared = versions.compare(folder, versions.Work(part, ranks, hosts, *sizes), rounds)
        slower += compared.ratio > 1
        print(f"{part:11} {compared}", flush=True)
    print(
        f"engine: {len(parts) - slower}/{len(parts)} parts not slower than {folder} by the median of {rounds} rounds"
    )
    return slower


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="parts by their letter or name", metavar="PART")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8, help="the global batch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--worker", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--compare-to", type=Path, metavar="FOLDER", help="a checkout of another version")
    options = parser.parse_args(arguments)
    config = llama(options.hidden, options.layers)
    sizes = (config, options.sequences, options.length, options.rounds)
    if options.worker:
        save(options.out, measure(options.worker, *sizes))
        end_rank()

    chosen = [p for p in PARTS if not options.only or p in options.only or p[0] in options.only]
    given = [f"--{name}={getattr(options, name)}" for name in SIZES]
    if options.compare_to:
        model = (options.hidden, options.layers, options.sequences, options.length)
        return min(1, compare(options.compare_to.resolve(), chosen, model, options.rounds))
    print(
        f"training steps of a Llama of hidden {options.hidden}, {options.layers} layers, {options.sequences} x "
        f"{options.length} tokens, fp32, Gloo on CPU; no GPU has run this"
    )
    good, missing = 0, []
    for part in chosen:
        ranks, hosts, _, _ = PARTS[part]
        if hosts == 1:
            with RankPool(ranks) as pool:
                result = pool.run(measure, ranks, part, *sizes, timeout_s=1800)[0]
        elif why_not() is not None:
            missing.append(part)
            continue
        else:
            with tempfile.TemporaryDirectory() as folder, Cluster(hosts=hosts, mbit=1000) as cluster:
                out = Path(folder) / "times.json"
                command = ["-m", "benchmarks.engine", "--worker", part, "--out", str(out)]
                code = cluster.run([*command, *given], ranks_per_host=ranks // hosts, timeout_s=1800)
                if code:
                    print(f"engine: the ranks of part {part} ended with {code}")
                    return code
                result = json.loads(out.read_text())
        good += show(part, result)
    if missing:
        print(f"not measured: {', '.join(missing)}: {why_not()}")
    print(f"engine: {good}/{len(chosen)} parts within their thresholds")
    return 0 if good == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
