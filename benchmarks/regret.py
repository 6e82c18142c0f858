"""How good is the plan's choice? Every layout of eight ranks predicted, then run.

On an emulated cluster of four hosts with two ranks each, at two rates of its links: `fourfold calibrate` measures the
cluster; every grid (data, z, y, x) of two models is predicted from its dry run by what was calibrated; then every one is
run and timed, each in processes of its own. Settings are the engine's defaults with streamed weights, one micro-batch,
no recomputation (memory does not bind here). Nothing is tuned on the steps that are measured. Bars, in each setting:

    the plan's first choice takes at most 3 % longer than the fastest that was measured
    the fastest that was measured is among the plan's first three
    Spearman's rank correlation of predicted and measured step times is at least 0.90
    the median error of a predicted step time is at most 15 %

    python -m benchmarks.regret
    python -m benchmarks.regret --models wide --mbit 200 --grids 8,1,1,1 1,8,1,1 1,1,1,8
    python -m benchmarks.regret --keep DIR    # stages that are in DIR already are not done again
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.cluster import Cluster, why_not
from benchmarks.measure import Times, batch, build, change_rate, in_fresh_world, llama, save, timed
from fourfold.cli.dryrun import grid_shape
from fourfold.dry_run.run import dryrun
from fourfold.mesh.axes import AXES, factorisations
from fourfold.mesh.grid import Grid
from fourfold.optim.clip import clip_grad_norm_
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.simulate import Simulated, predict
from fourfold.profiling.step_report import StepReport, measure_step

HOSTS, RANKS_PER_HOST = 4, 2
WORLD = HOSTS * RANKS_PER_HOST
FIRST_CHOICE_BAR, TOP, SPEARMAN_BAR, ERROR_BAR = 0.03, 3, 0.90, 0.15
WARM_UP = 3
SEQUENCES = 2 * WORLD  # two for each rank on any grid, so that half-batches alternate everywhere or nowhere
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Model:
    hidden: int
    layers: int
    length: int

    @property
    def config(self) -> LlamaConfig:
        return llama(self.hidden, self.layers)


MODELS = {
    "wide": Model(512, 2, 64),  # many weights for its tokens
    "deep": Model(256, 4, 64),  # many tokens for its weights
    "tiny": Model(128, 1, 16),  # for tests
}


# -- on the ranks -----------------------------------------------------------------------------------------------------------


def time_layout(model: Model, shape: Shape, rates: Sequence[float], steps: int) -> dict[str, Any]:
    """Seconds of the steps at each rate, and where a rank's time went in them: means over ranks and steps."""
    grid = Grid.create(shape, timeout_s=600)
    step = training_step(model, grid)
    change_rate(None)
    for _ in range(WARM_UP):
        step()
    found = {}
    for mbit in rates:
        change_rate(mbit)
        step()
        reports: list[StepReport] = []

        def reported(reports: list[StepReport] = reports) -> None:
            with measure_step(grid) as report:
                step()
            reports.append(report)

        seconds = [timed(reported) for _ in range(steps)]
        parts = torch.tensor([[r.compute_s, *map(r.exposed_s, AXES)] for r in reports]).mean(0)
        dist.all_reduce(parts)
        means = (parts / dist.get_world_size()).tolist()
        found[str(mbit)] = {
            "seconds": seconds,
            "parts": dict(zip(("compute", *AXES), means, strict=True)),
        }
    return found


def training_step(model: Model, grid: Grid) -> Callable[[], None]:
    """The step of a dry run: forward, backward, clipping, AdamW."""
    module = build(model.config, grid, weights="streamed")
    optimizer = sharded_optimizer(torch.optim.AdamW)(module.parameters(), lr=1e-4, foreach=False)
    ids = batch(model.config, SEQUENCES, model.length)
    ids = ids[grid.local_rows(len(ids))]

    def step() -> None:
        module(input_ids=ids, labels=ids).loss.backward()
        clip_grad_norm_(module.parameters(), 1.0, grid)
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_ranks(options: argparse.Namespace) -> None:
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for i, shape in enumerate(options.grids):
        if str(shape) in found:
            continue
        found[str(shape)] = in_fresh_world(
            time_layout, MODELS[options.models[0]], shape, options.mbit, options.steps
        )
        if os.environ["RANK"] == "0":
            times = {
                mbit: f"{Times(tuple(of['seconds'])).median_s:.3f} s"
                for mbit, of in found[str(shape)].items()
            }
            print(f"    {i + 1}/{len(options.grids)} {shape}: {times}", flush=True)
        save(options.out, found)


# -- one setting: predicted against measured --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    shape: Shape
    predicted: Simulated
    measured: Times
    parts: Mapping[str, float]

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.measured.median_s - 1


@dataclass(frozen=True)
class Bar:
    what: str
    figure: str
    holds: bool


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """What the setting has to hold."""
    plan = sorted(rows, key=lambda row: row.predicted.step_s)
    fastest = min(rows, key=lambda row: row.measured.median_s)
    regret = plan[0].measured.median_s / fastest.measured.median_s - 1
    place = plan.index(fastest) + 1
    correlation = spearman([r.predicted.step_s for r in rows], [r.measured.median_s for r in rows])
    error = statistics.median(abs(r.error) for r in rows)
    return [
        Bar(f"first choice within {FIRST_CHOICE_BAR:.0%}", f"{regret:.1%}", regret <= FIRST_CHOICE_BAR),
        Bar(f"fastest in the first {TOP}", f"number {place}", place <= TOP),
        Bar(f"Spearman at least {SPEARMAN_BAR:.2f}", f"{correlation:.3f}", correlation >= SPEARMAN_BAR),
        Bar(f"median error at most {ERROR_BAR:.0%}", f"{error:.1%}", error <= ERROR_BAR),
    ]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; equal values share theirs.

    Example:
        >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
        0.8
    """

    def ranked(values: Sequence[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    return round(statistics.correlation(ranked(a), ranked(b)), 12)


def show(title: str, rows: Sequence[Row]) -> list[Bar]:
    print(f"\n{title}")
    print(
        f"    {'(data, z, y, x)':16} {'predicted':>10} {'measured':>18} {'error':>7}   computation and waits, predicted | measured"
    )
    for row in sorted(rows, key=lambda row: row.measured.median_s):
        ours = " ".join(f"{a} {row.predicted.exposed_s.get(a, 0.0):.2f}" for a in AXES if row.parts[a])
        theirs = " ".join(f"{a} {row.parts[a]:.2f}" for a in AXES if row.parts[a])
        print(
            f"    {row.shape!s:16} {row.predicted.step_s:8.3f} s {row.measured!s:>18} {row.error:+7.0%}   "
            f"{row.predicted.compute_s:.2f} {ours} | {row.parts['compute']:.2f} {theirs}"
        )
    bars = bars_of(rows)
    for bar in bars:
        print(f"    {bar.what}: {bar.figure}{'' if bar.holds else '   MISSED'}")
    sys.stdout.flush()
    return bars


def plot(settings: Mapping[str, Sequence[Row]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 6))
    for title, rows in settings.items():
        measured, predicted = [r.measured.median_s for r in rows], [r.predicted.step_s for r in rows]
        axes.scatter(measured, predicted, s=22, alpha=0.8, label=title)
    every = [v for rows in settings.values() for r in rows for v in (r.measured.median_s, r.predicted.step_s)]
    low, high = min(every) / 1.15, max(every) * 1.15
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    for factor in (1 - ERROR_BAR, 1 + ERROR_BAR):
        axes.plot([low, high], [low * factor, high * factor], color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("measured step, s")
    axes.set_ylabel("predicted step, s")
    axes.set_title("All grids of 8 ranks on 4 emulated hosts, by calibration")
    axes.title.set_fontsize(10)
    axes.legend(loc="upper left", fontsize=8, title=f"dashed: ±{ERROR_BAR:.0%}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


# -- stages -----------------------------------------------------------------------------------------------------------------


def calibrate(network: Cluster, mbit: float, out: Path, minutes: float) -> None:
    if out.exists():
        return
    print(f"calibrating at {mbit:g} Mbit/s", flush=True)
    network.set_rate(mbit)
    command = ["-m", "fourfold", "calibrate", "--out", str(out), "--minutes", str(minutes)]
    log = out.with_suffix(".log")
    with log.open("wb") as stdout:
        code = network.run(command, ranks_per_host=RANKS_PER_HOST, timeout_s=900, stdout=stdout)
    if code:
        raise SystemExit(f"regret: calibrate ended with {code}; see {log}")


def run_all(network: Cluster, name: str, options: argparse.Namespace, out: Path) -> None:
    if out.exists() and set(json.loads(out.read_text())) >= set(map(str, options.grids)):
        return
    print(f"running {name}: {len(options.grids)} layouts", flush=True)
    command = ["-m", "benchmarks.regret", "--out", str(out), "--models", name, "--steps", str(options.steps)]
    command += ["--mbit", *map(str, options.mbit), "--grids"]
    command += [",".join(map(str, shape)) for shape in options.grids]
    code = network.run(command, ranks_per_host=RANKS_PER_HOST, timeout_s=3600)
    if code:
        raise SystemExit(f"regret: the ranks ended with {code}")


def predict_all(name: str, grids: Sequence[Shape], cluster: clusters.Cluster) -> dict[Shape, Simulated]:
    return {shape: predict(_events(name, shape), shape, cluster) for shape in grids}


_traces: dict[tuple[str, Shape], Any] = {}


def _events(name: str, shape: Shape) -> Any:
    if (name, shape) not in _traces:
        model = MODELS[name]
        run = dryrun(
            model.config,
            shape,
            sequences=SEQUENCES,
            length=model.length,
            precision="fp32",
            weights="streamed",
            target="cpu",
        )
        _traces[name, shape] = run.trace.events
    return _traces[name, shape]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["wide", "deep"], choices=list(MODELS))
    parser.add_argument("--mbit", type=float, nargs="+", default=[200.0, 600.0])
    parser.add_argument("--grids", type=grid_shape, nargs="+", default=factorisations(WORLD))
    parser.add_argument("--steps", type=int, default=3, help="timed at each rate")
    parser.add_argument("--minutes", type=float, default=4.0, help="for each calibration")
    parser.add_argument("--plot", type=Path, help="where to draw predicted against measured (PNG)")
    parser.add_argument(
        "--keep", type=Path, help="folder for what was measured; what is there is taken from it"
    )
    parser.add_argument("--hosts", type=int, default=HOSTS, help="with fewer, give --grids of their ranks")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.out:
        run_ranks(options)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"regret: {reason}")
        return 2
    print(
        f"training steps on {options.hosts} emulated hosts of {RANKS_PER_HOST} ranks, Gloo on CPU; no GPU has run this"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        files = {mbit: folder / f"cluster-{mbit:g}.toml" for mbit in options.mbit}
        steps = {name: folder / f"steps-{name}.json" for name in options.models}
        with Cluster(hosts=options.hosts, mbit=1000) as network:
            for mbit, path in files.items():
                calibrate(network, mbit, path, options.minutes)
            # Predicted before anything is run.
            predicted = {
                (name, mbit): predict_all(name, options.grids, clusters.load(path))
                for name in options.models
                for mbit, path in files.items()
            }
            for name, path in steps.items():
                run_all(network, name, options, path)
        settings: dict[str, list[Row]] = {}
        for name, path in steps.items():
            found = json.loads(path.read_text())
            for mbit in options.mbit:
                model = MODELS[name]
                title = f"{name} (hidden {model.hidden}, {model.layers} layers, {SEQUENCES} x {model.length}) at {mbit:g} Mbit/s"
                settings[title] = [
                    Row(shape, predicted[name, mbit][shape], Times(tuple(of["seconds"])), of["parts"])
                    for shape in options.grids
                    for of in [found[str(shape)][str(mbit)]]
                ]
    bars = [bar for title, rows in settings.items() for bar in show(title, rows)]
    if options.plot:
        plot(settings, options.plot)
    held = sum(bar.holds for bar in bars)
    print(f"\nregret: {held}/{len(bars)} bars hold")
    return 0 if held == len(bars) else 1


if __name__ == "__main__":
    sys.exit(main())
