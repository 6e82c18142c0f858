"""How much of the communication hides behind computation?

Two emulated hosts with a rank each, one axis of size 2 at a time. The rate of their links is set so that communication
alone takes as long as computation alone: then the step can be no faster than either, and without overlap it takes both.
Forward and backward are timed with nothing overlapped, with each overlap by itself, and with all of them, in turns.

    python -m benchmarks.overlap
    python -m benchmarks.overlap --axes z --timeline trace.json   # a trace of a step with everything on

*Computation alone* is the same step with nothing sent; *communication alone* is the step's collectives, a few in flight
at a time. Bars for everything on: 1.20 x the longer of the two on z and data, 1.40 x on x and y. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fourfold as ff
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
    stepper,
    timed,
)
from fourfold import Overlap
from fourfold.mesh.axes import AXES

BARS = {"x": 1.40, "y": 1.40, "z": 1.20, "data": 1.20}
OFF = Overlap.none()
ACTIVATIONS = {
    "nothing": OFF,
    "backward behind dW": replace(OFF, backward=True),
    "forward in chunks": replace(OFF, forward_chunks="auto"),
    "halves in turns": replace(OFF, interleave=True),
    "everything": Overlap(),
}
WEIGHTS = {
    "nothing": OFF,
    "gather ahead": replace(OFF, prefetch=Overlap().prefetch),
    "scatter behind": replace(OFF, gradients=True),
    "everything": Overlap(),
}
GRADIENTS = {"nothing": OFF, "everything": Overlap()}
VARIANTS = {"x": ACTIVATIONS, "y": ACTIVATIONS, "z": WEIGHTS, "data": GRADIENTS}


def worker(axis: str, options: argparse.Namespace) -> None:
    """Measure one axis; every rank runs this."""
    shape = tuple(2 if a == axis else 1 for a in AXES)
    grid = ff.Grid.create(shape, timeout_s=600)  # type: ignore[arg-type]
    config = llama(options.hidden, options.layers)
    ids = batch(config, options.sequences, options.length)[grid.local_rows(options.sequences)]
    models = {
        name: build(config, grid, weights="streamed", overlap=overlap)
        for name, overlap in VARIANTS[axis].items()
    }
    steps = {name: stepper(model, ids) for name, model in models.items()}
    for step in steps.values():
        for _ in range(3):  # one to see who are siblings, one to record the order of weights
            step()

    def compute() -> None:
        with silent():
            steps["nothing"]()

    flights = record(steps["nothing"], grid)
    communicate = replay(flights, grid)
    compute_s = statistics.median(timed(compute) for _ in range(3))
    mbit = balance(compute_s, communicate, sent_bytes(flights, grid) * 8 / compute_s / 1e6)
    times = interleaved({**steps, "computation": compute, "communication": communicate}, options.rounds)
    reports = {}
    for name, step in steps.items():
        seen = []
        for _ in range(3):
            dist.barrier()
            cpu_s, own_cpu_s = time.process_time(), own_threads_s()
            with ff.measure_step(grid) as report:
                step()
            gloo_s = time.process_time() - cpu_s - (own_threads_s() - own_cpu_s)
            seen.append((report.step_s, report, gloo_s))
        _, middle, gloo_s = sorted(seen, key=lambda s: s[0])[1]
        reports[name] = {
            "compute": middle.compute_s,
            "exposed": middle.exposed_s(),
            "gloo": gloo_s,
        }
    if options.timeline:
        with ff.timeline(options.timeline, grid):
            steps["everything"]()
    results = {
        "mbit": mbit,
        "sent_mb": sent_bytes(flights, grid) / 1e6,
        "flights": len(flights),
        "reports": reports,
    }
    save(options.out, {**results, "times": {name: t.seconds for name, t in times.items()}})
    end_rank()


def own_threads_s() -> float:
    """CPU seconds of the threads that compute, so far: all but Gloo's, by their names."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        name, _, fields = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        if "gloo" not in name:
            total += sum(map(int, fields.split()[11:13])) / ticks
    return total


def show(axis: str, result: dict[str, Any]) -> float:
    """Print what was measured; returns the ratio of everything on to the limit."""
    times = {name: Times(tuple(seconds)) for name, seconds in result["times"].items()}
    compute, communicate = times["computation"], times["communication"]
    limit = Times(tuple(max(pair) for pair in zip(compute.seconds, communicate.seconds, strict=True)))
    print(
        f"\n{axis} = 2, links of {result['mbit']:.0f} Mbit/s, {result['sent_mb']:.0f} MB in {result['flights']} collectives"
    )
    print(f"    computation alone {compute}, communication alone {communicate}")
    for name in VARIANTS[axis]:
        part = result["reports"][name]
        print(
            f"    {name:20} {times[name]!s:16} {ratio(times[name], limit):5.2f} x the limit   "
            f"one step: compute {part['compute']:.3f} + exposed {part['exposed']:.3f} s; "
            f"Gloo's threads {part['gloo']:.3f} s on the CPU"
        )
    return ratio(times["everything"], limit)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Compute and exposed time, stacked, for each axis and overlap; the limit as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(3.6 * len(results), 4.4), squeeze=False)
    for panel, (axis, result) in zip(panels[0], results.items(), strict=True):
        names = list(VARIANTS[axis])
        bottom = [0.0] * len(names)
        parts = (
            ("compute", "computation", "#4878a8"),
            ("exposed", f"exposed on {axis}", "#d0743c"),
        )
        for key, label, colour in parts:
            heights = [max(0.0, result["reports"][name][key]) for name in names]
            panel.bar(names, heights, bottom=bottom, label=label, color=colour, width=0.65)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        pairs = zip(result["times"]["computation"], result["times"]["communication"], strict=True)
        panel.axhline(
            statistics.median(max(pair) for pair in pairs), color="black", linestyle="--", label="limit"
        )
        panel.set_title(f"{axis} = 2 at {result['mbit']:.0f} Mbit/s", fontsize=10)
        panel.tick_params(axis="x", labelrotation=35)
        for label in panel.get_xticklabels():
            label.set_horizontalalignment("right")
        panel.set_ylim(0, 1.4 * max(bottom))  # room for the legend
        panel.legend(fontsize=8, loc="upper right")
    panels[0][0].set_ylabel("seconds of forward and backward")
    figure.suptitle("Two emulated hosts, a CPU rank each, Gloo; no GPU has run this", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", default=list(BARS), choices=list(BARS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8, help="the global batch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--figure", type=Path, help="write the figure here (PNG or SVG)")
    parser.add_argument("--timeline", help="write a trace of a step with everything on; {axis} is filled in")
    parser.add_argument("--worker", choices=list(BARS), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker, options)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"overlap: {reason}")
        return 2

    print("forward and backward of a Llama on two emulated hosts, Gloo on CPU; no GPU has run this")
    results: dict[str, dict[str, Any]] = {}
    past = []
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2, mbit=1000) as cluster:
        for axis in options.axes:
            out = Path(folder) / f"{axis}.json"
            command = ["-m", "benchmarks.overlap", "--worker", axis, "--out", str(out)]
            for name in ("rounds", "hidden", "layers", "sequences", "length"):
                command += [f"--{name}", str(getattr(options, name))]
            if options.timeline:
                command += ["--timeline", options.timeline.replace("{axis}", axis)]
            code = cluster.run(command, ranks_per_host=1, timeout_s=1800)
            if code:
                print(f"overlap: the ranks of axis {axis} ended with {code}")
                return code
            results[axis] = json.loads(out.read_text())
            reached = show(axis, results[axis])
            if reached > BARS[axis]:
                past.append(f"{axis} {reached:.2f} > {BARS[axis]:.2f}")
    if options.figure:
        draw(results, options.figure)
    print(
        f"\noverlap: {len(results) - len(past)}/{len(results)} axes within their thresholds {'; '.join(past)}"
    )
    return 1 if past else 0


if __name__ == "__main__":
    sys.exit(main())
