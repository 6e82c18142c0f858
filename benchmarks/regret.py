"""How good is the plan's choice? Every layout of eight ranks predicted, then played.

Four nodes of two devices in slow motion (`benchmarks.slow_motion`), with the proportions of two clusters. Every grid (data, z, y, x) of
two models is predicted from its dry run, as `fourfold plan --simulate` does, and then played with links that its collectives really share.
Settings are the engine's defaults on GPUs with streamed weights, one micro-batch, no recomputation (memory does not bind here).
Thresholds, in each setting:

    the plan's first choice takes at most 3 % longer than the fastest that was played
    the fastest that was played is among the plan's first three
    Spearman's rank correlation of predicted and played step times is at least 0.95
    the median error of a predicted step time is at most 5 %

    python -m benchmarks.regret
    python -m benchmarks.regret --models wide --clusters dgx-h100 --figure regret.png
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import why_not
from benchmarks.slow_motion import steps
from benchmarks.slow_motion.conductor import MOST_CPU, Orchestra, Played
from benchmarks.slow_motion.program import Program
from benchmarks.slow_motion.proportions import CLOUD, CLUSTERS, cluster_of, scale_of
from fourfold.cli.dryrun import grid_shape
from fourfold.config.describe import sized_model_config
from fourfold.dry_run.events import Event
from fourfold.dry_run.run import dryrun
from fourfold.mesh.axes import AXES, factorisations
from fourfold.planner.inputs.cluster import Cluster, Device
from fourfold.planner.simulate import Simulated, predict

NODES, PER_NODE = 4, 2
WORLD = NODES * PER_NODE
FIRST_CHOICE, TOP, SPEARMAN, ERROR = 0.03, 3, 0.95, 0.05
STEP_S = 1.0  # of the fastest, here
Shape = tuple[int, int, int, int]
MODELS = {
    # many weights for its tokens
    "wide": steps.Job(
        sized_model_config("8b", 32_000) | {"num_hidden_layers": 2, "tie_word_embeddings": False},
        sequences=8,
        length=512,
    ),
    # many tokens for its weights
    "deep": steps.Job(sized_model_config("1b", 8_000) | {"num_hidden_layers": 6}, sequences=16, length=2048),
}


@dataclass(frozen=True)
class Row:
    shape: Shape
    predicted: Simulated
    played: Played

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.played.median_s - 1


@dataclass(frozen=True)
class Threshold:
    what: str
    figure: str
    holds: bool


def thresholds_of(rows: Sequence[Row]) -> list[Threshold]:
    """What the setting has to hold."""
    plan = sorted(rows, key=lambda row: row.predicted.step_s)
    fastest = min(rows, key=lambda row: row.played.median_s)
    regret = plan[0].played.median_s / fastest.played.median_s - 1
    place = plan.index(fastest) + 1
    correlation = spearman([r.predicted.step_s for r in rows], [r.played.median_s for r in rows])
    error = statistics.median(abs(r.error) for r in rows)
    return [
        Threshold(f"first choice within {FIRST_CHOICE:.0%}", f"{regret:.1%}", regret <= FIRST_CHOICE),
        Threshold(f"fastest in the first {TOP}", f"number {place}", place <= TOP),
        Threshold(f"Spearman at least {SPEARMAN:.2f}", f"{correlation:.3f}", correlation >= SPEARMAN),
        Threshold(f"median error at most {ERROR:.0%}", f"{error:.1%}", error <= ERROR),
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


def measure(model: str, name: str, grids: Sequence[Shape], rounds: int) -> list[Row]:
    cluster = cluster_of(name, PER_NODE)
    predicted, programs = {}, {}
    for shape in grids:
        events, programs[str(shape)] = _step(model, shape, cluster)
        predicted[shape] = predict(events, shape, cluster)
    scale = scale_of(cluster, min(p.step_s for p in predicted.values()), STEP_S)
    with Orchestra(cluster, NODES, scale, programs) as orchestra:
        played = orchestra.play(rounds)
    return [Row(shape, predicted[shape], played[str(shape)]) for shape in grids]


_steps: dict[tuple[str, Shape, Device], tuple[Sequence[Event], Program]] = {}


def _step(model: str, shape: Shape, cluster: Cluster) -> tuple[Sequence[Event], Program]:
    """The events of its dry run, and what is played of it: the same for all clusters with this device."""
    key = model, shape, cluster.device
    if key not in _steps:
        job = MODELS[model]
        options: dict[str, Any] = {"weights": "streamed", "precision": "bf16"}
        run = dryrun(job.config, shape, sequences=job.sequences, length=job.length, **options)
        _steps[key] = run.trace.events, steps.fourfold(job, shape, cluster, **options)
    return _steps[key]


def show(title: str, rows: Sequence[Row]) -> list[Threshold]:
    print(f"\n{title}")
    print(f"    {'(data, z, y, x)':16} {'predicted':>12} error   computation and waits as predicted; played")
    for row in sorted(rows, key=lambda row: row.played.median_s):
        step = row.predicted
        waits = " ".join(f"{a} {step.exposed_s[a] * 1e3:.1f}" for a in AXES if step.exposed_s.get(a))
        print(
            f"    {row.shape!s:16} {step.step_s * 1e3:9.2f} ms {row.error:+6.1%}   "
            f"{step.compute_s * 1e3:.1f} {waits}; {row.played}"
        )
    found = thresholds_of(rows)
    for threshold in found:
        print(f"    {threshold.what}: {threshold.figure}{'' if threshold.holds else '   MISSED'}")
    sys.stdout.flush()
    return found


def draw(settings: Mapping[str, Sequence[Row]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(figsize=(6.5, 6))
    for title, rows in settings.items():
        played = [r.played.median_s * 1e3 for r in rows]
        axes.scatter(played, [r.predicted.step_s * 1e3 for r in rows], s=22, alpha=0.8, label=title)
    every = [
        v * 1e3 for rows in settings.values() for r in rows for v in (r.played.median_s, r.predicted.step_s)
    ]
    low, high = min(every) / 1.15, max(every) * 1.15
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    for factor in (1 - ERROR, 1 + ERROR):
        axes.plot([low, high], [low * factor, high * factor], color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.set_minor_formatter("{x:g}")
    axes.set_xlabel("played step, ms")
    axes.set_ylabel("predicted step, ms")
    axes.set_title(f"All grids of {WORLD} devices on {NODES} nodes, in slow motion", fontsize=10)
    axes.legend(loc="upper left", fontsize=8, title=f"dashed: ±{ERROR:.0%}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clusters", nargs="+", default=["dgx-h100", CLOUD], choices=CLUSTERS)
    parser.add_argument("--grids", type=grid_shape, nargs="+", default=factorisations(WORLD))
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, in turns (3)")
    parser.add_argument("--figure", type=Path, help="where to draw predicted against played (PNG or SVG)")
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason is not None:
        print(f"regret: {reason}")
        return 2
    settings, found = {}, []
    for model in options.models:
        for name in options.clusters:
            rows = measure(model, name, options.grids, options.rounds)
            settings[f"{model}, {name}"] = rows
            found += show(f"{model}, {name}", rows)
    if options.figure:
        draw(settings, options.figure)
    held = sum(threshold.holds for threshold in found)
    busiest = max(row.played.cpu for rows in settings.values() for row in rows)
    print(f"\nregret: {held}/{len(found)} thresholds hold")
    print(f"ranks took {busiest:.0%} of the cores, at most {MOST_CPU:.0%}")
    return 0 if held == len(found) and busiest <= MOST_CPU else 1


if __name__ == "__main__":
    sys.exit(main())
