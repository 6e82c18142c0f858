"""The best 4D layout compared with the best layout of stock PyTorch, on the same emulated cluster.

Four hosts of two ranks each, at two link bandwidths, in two regimes: a global batch large enough for any split, and
the strong-scaling limit, where it has so few sequences that they cannot be split over all ranks. Ours: every grid
(data, z, y, x) that the batch allows, everything overlapped. Theirs: every split of `fully_shard` (HSDP and DDP included)
x 1D `parallelize_module`, with prefetch (`benchmarks.baseline`). Both sides are searched by measuring every layout at
each rate, then options of the two best; the winners are timed alternately. The shares of overlap and layout are printed
separately: overlap is ours on *their* layout, layout is ours on ours. Threshold: 1.26 x faster in each regime.

    python -m benchmarks.headline
    python -m benchmarks.headline --regimes strong --mbit 400

Theirs is also shown tuned beyond what PyTorch has (gradients reduced during backward on CPU), without a threshold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from benchmarks import baseline
from benchmarks.cluster import Cluster, why_not
from benchmarks.engine import opponent, ours
from benchmarks.measure import (
    Times,
    batch,
    change_rate,
    in_fresh_world,
    interleaved,
    llama,
    ratio,
    save,
    timed,
)
from fourfold import Overlap
from fourfold.mesh.axes import factorisations
from fourfold.mesh.grid import Grid

THRESHOLD = 1.26
HOSTS, RANKS_PER_HOST = 4, 2
# regime: (sequences in the global batch, tokens in each)
REGIMES = {"large batch": (16, 128), "strong scaling": (2, 512)}
# bytes: keep every gathered weight until backward, as with reshard_after_forward=False
ALL_WEIGHTS = 2**40
Shape = tuple[int, int, int, int]
Step = Callable[[], None]


def build_ours(
    config: LlamaConfig, ids: Any, shape: Shape, usual: Overlap | None = None, **changes: Any
) -> Step:
    overlap = replace(usual or Overlap(), **{"keep_bytes": ALL_WEIGHTS, **changes})
    return ours(config, Grid.create(shape, timeout_s=600), ids, weights="streamed", overlap=overlap)


def build_theirs(config: LlamaConfig, ids: Any, layout: baseline.Layout, **changes: Any) -> Step:
    return opponent(config, layout, ids, **{"overlap": False, "reshard_after_forward": False, **changes})


def quick_s(make: Callable[[], Step], rates: list[float]) -> list[float] | str:
    """The better of two steps at each rate, or the reason why PyTorch or Fourfold rejects the layout."""
    try:
        step = make()
    except ValueError as error:
        return str(error)
    change_rate(None)
    for _ in range(2):
        step()
    seconds = []
    for mbit in rates:
        change_rate(mbit)
        seconds.append(min(timed(step), timed(step)))
    return seconds


def search(candidates: dict[str, Callable[[], Step]], rates: list[float]) -> dict[str, list[float]]:
    """Seconds of each candidate at each rate, without those that PyTorch or Fourfold rejects."""
    found = {}
    for name, make in candidates.items():
        start_s = time.perf_counter()
        seconds = in_fresh_world(quick_s, make, rates)
        if isinstance(seconds, str):
            say(f"    {name}: rejected: {seconds}")
            continue
        found[name] = seconds
        times = "  ".join(f"{s:.2f} s" for s in seconds)
        say(f"    {name:44} {times}   ({time.perf_counter() - start_s:.0f} s)")
    return found


def say(what: str) -> None:
    if os.environ["RANK"] == "0":
        print(what, flush=True)


def best(found: dict[str, list[float]], rate: int) -> list[str]:
    """Names, the fastest first."""
    return sorted(found, key=lambda name: found[name][rate])


def regime_of(name: str, config: LlamaConfig, rates: list[float], rounds: int) -> dict[str, Any]:
    sequences, length = REGIMES[name]
    ids = batch(config, sequences, length)
    say(f"\n{name}: {sequences} sequences of {length}; search, seconds at {rates} Mbit/s")
    heads, world = config.num_attention_heads, int(os.environ["WORLD_SIZE"])
    grids = {str(s): s for s in factorisations(world) if sequences % (s[0] * s[1]) == 0 and heads % s[3] == 0}
    layouts = {
        str(lay): lay
        for lay in baseline.layouts(
            world, heads=heads, kv_heads=config.num_key_value_heads, global_batch=sequences
        )
    }
    our_makers: dict[str, Callable[[], Step]] = {
        f"ours {n}": lambda s=s: build_ours(config, ids, s) for n, s in grids.items()
    }
    their_makers: dict[str, Callable[[], Step]] = {
        f"theirs {n}": lambda s=s: build_theirs(config, ids, s) for n, s in layouts.items()
    }
    our_found, their_found = search(our_makers, rates), search(their_makers, rates)

    # Options of the best layouts.
    more_ours: dict[str, Callable[[], Step]] = {}
    more_theirs: dict[str, Callable[[], Step]] = {}
    for rate in range(len(rates)):
        for n in best(our_found, rate)[:2]:
            shape = grids[n.removeprefix("ours ")]
            changes: list[dict[str, Any]] = []
            if shape[2] * shape[3] > 1:
                changes += [{"interleave": False}, {"forward_chunks": 1}]
            for change in changes:
                more_ours[f"{n} {change}"] = lambda s=shape, c=change: build_ours(config, ids, s, **c)
        for n in best(their_found, rate)[:2]:
            layout = layouts[n.removeprefix("theirs ")]
            changes = []
            if layout.shards > 1:
                changes += [{"reshard_after_forward": True}, {"prefetch_depth": 2}]
            if layout.tensor > 1:
                changes.append({"sequence_parallel": True})
            for change in changes:
                more_theirs[f"{n} {change}"] = lambda s=layout, c=change: build_theirs(config, ids, s, **c)
    our_found |= search(more_ours, rates)
    their_found |= search(more_theirs, rates)

    results = {}
    for rate, mbit in enumerate(rates):
        our_name, their_name = best(our_found, rate)[0], best(their_found, rate)[0]
        layout = next(lay for n, lay in layouts.items() if their_name.startswith(f"theirs {n}"))
        same: Shape = (layout.replicas, layout.shards, 1, layout.tensor)
        makers: dict[str, Callable[[], Step]] = {
            "ours": (our_makers | more_ours)[our_name],
            "theirs": (their_makers | more_theirs)[their_name],
            "theirs tuned": lambda lay=layout: build_theirs(config, ids, lay, overlap=True),
            "ours on their layout": lambda s=same: build_ours(config, ids, s),
            "ours on their layout, nothing overlapped": lambda s=same: build_ours(
                config, ids, s, Overlap.none()
            ),
        }
        results[str(mbit)] = {
            "ours": our_name,
            "theirs": their_name,
            # First only these two, without the process groups of the others; then all, to explain the difference.
            "pair": in_fresh_world(alternately, {n: makers[n] for n in ("ours", "theirs")}, mbit, rounds),
            "times": in_fresh_world(alternately, makers, mbit, rounds),
        }
    return results


def alternately(
    makers: dict[str, Callable[[], Step]], mbit: float, rounds: int
) -> dict[str, tuple[float, ...]]:
    """Seconds of each step function, measured alternately."""
    ways = {name: make() for name, make in makers.items()}
    change_rate(None)
    for step in ways.values():
        for _ in range(3):
            step()
    change_rate(mbit)
    return {name: times.seconds for name, times in interleaved(ways, rounds).items()}


def show(regime: str, mbit: str, result: dict[str, Any]) -> float:
    times = {n: Times(tuple(seconds)) for n, seconds in result["times"].items()}
    pair = {n: Times(tuple(seconds)) for n, seconds in result["pair"].items()}
    faster = ratio(pair["theirs"], pair["ours"])
    overlap = ratio(times["theirs"], times["ours on their layout"])
    layout = ratio(times["ours on their layout"], times["ours"])
    print(f"\n{regime} at {float(mbit):.0f} Mbit/s: {faster:.2f} x faster (threshold {THRESHOLD})")
    print(f"    {result['ours']}: {pair['ours']}")
    print(f"    {result['theirs']}: {pair['theirs']}")
    plain = times["ours on their layout, nothing overlapped"]
    print(
        f"    all together: ours {times['ours']}, theirs {times['theirs']}, theirs tuned {times['theirs tuned']}, "
        f"ours on their layout {times['ours on their layout']}, with nothing overlapped {plain}"
    )
    print(f"    engine and overlap {overlap:.2f} x, layout {layout:.2f} x", flush=True)
    return faster


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--regimes",
        nargs="+",
        default=list(REGIMES),
        help="regimes by their first word: large, strong (default: all)",
    )
    parser.add_argument("--mbit", type=float, nargs="+", default=[200.0, 400.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    regimes = [r for r in REGIMES if any(r.startswith(word) for word in options.regimes)]
    if options.out:
        config = llama(options.hidden, options.layers)
        results = {r: regime_of(r, config, options.mbit, options.rounds) for r in regimes}
        save(options.out, results)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"headline: {reason}")
        return 2

    print(
        f"training steps on {options.hosts} emulated hosts of {RANKS_PER_HOST} ranks, Gloo on CPU; no GPU has run this"
    )
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=options.hosts, mbit=1000) as cluster:
        out = Path(folder) / "times.json"
        command = ["-m", "benchmarks.headline", "--out", str(out), "--regimes", *regimes]
        command += ["--mbit", *map(str, options.mbit)]
        for name in ("rounds", "hidden", "layers"):
            command += [f"--{name}", str(getattr(options, name))]
        code = cluster.run(command, ranks_per_host=RANKS_PER_HOST, timeout_s=7200)
        if code:
            print(f"headline: the ranks exited with {code}")
            return code
        results = json.loads(out.read_text())
    reached = [show(r, mbit, result) for r, rates in results.items() for mbit, result in rates.items()]
    held = sum(f >= THRESHOLD for f in reached)
    print(f"\nheadline: {held}/{len(reached)} regimes and rates at {THRESHOLD} x or more")
    return 0 if held == len(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
