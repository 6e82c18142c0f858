"""How much of the communication hides behind computation?

On a cluster in slow motion (`benchmarks.slow_motion`): two nodes of one device each, one axis of size 2 at a time, forward and backward of a
Llama in bf16. The rate of their links is set so that communication alone takes as long as computation alone, or half as long.
A step is played with nothing overlapped, with each overlap by itself, and with all of them, in turns.

    python -m benchmarks.overlap
    python -m benchmarks.overlap --axes z --figure overlap.png

What is sent in forward can only hide behind forward, and what is sent in backward behind backward. The longer of the two, added up over both
phases, is the floor of any schedule of one step. Thresholds: with everything overlapped at most 1.10 x the floor on x and y, 1.08 on z,
1.05 on data, at both rates. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cluster import why_not
from benchmarks.slow_motion import steps
from benchmarks.slow_motion.conductor import MOST_CPU, Orchestra, Played
from benchmarks.slow_motion.machines import Scale
from benchmarks.slow_motion.proportions import balanced
from fourfold import Overlap
from fourfold.config.describe import sized_model_config
from fourfold.mesh.axes import AXES
from fourfold.planner.inputs.cluster import Cluster, Library, preset

THRESHOLDS = {"x": 1.10, "y": 1.10, "z": 1.08, "data": 1.05}
SHARES = {"as long as computation": 1.0, "half as long": 0.5}
OFF = Overlap.none()
ACTIVATIONS = {
    "nothing": OFF,
    "backward during dW": replace(OFF, backward=True),
    "forward in chunks": replace(OFF, forward_chunks="auto"),
    "batch-split overlap": replace(OFF, interleave=True),
    "everything": Overlap(interleave=True),
}
WEIGHTS = {
    "nothing": OFF,
    "prefetch": replace(OFF, prefetch=Overlap().prefetch),
    "reduce-scatter during backward": replace(OFF, gradients=True),
    "everything": Overlap(),
}
GRADIENTS = {"nothing": OFF, "everything": Overlap()}
VARIANTS = {"x": ACTIVATIONS, "y": ACTIVATIONS, "z": WEIGHTS, "data": GRADIENTS}
LAYERS, SEQUENCES, LENGTH = 4, 8, 1024
VOCABULARY = 4096  # next to nothing hides behind the head
PAYLOAD = 100.0
STEP_S = 3.0  # of computation alone, here


@dataclass(frozen=True)
class Result:
    axis: str
    share: str
    node_gbps: float
    compute_s: float
    communication_s: float
    floor_s: float
    played: dict[str, Played]

    @property
    def limit_s(self) -> float:
        return max(self.compute_s, self.communication_s)

    def times_floor(self, name: str = "everything") -> float:
        return self.played[name].median_s / self.floor_s


def cluster_of(node_gbps: float) -> Cluster:
    """Two nodes of one H100, without the latencies of a library, so that rates alone decide."""
    whole = preset("dgx-h100")
    library = Library(base_us=10.0, hop_us=0.0, net_hop_us=5.0, device_share=1.0, node_share=1.0)
    links = replace(whole.links, devices_per_node=1, node_gbps=node_gbps)
    return replace(whole, links=links, library=replace(library, algorithms=("ring",), small_gbps=1e-9))


def measure(axis: str, share: str, rounds: int) -> Result:
    shape = tuple(2 if a == axis else 1 for a in AXES)
    job = steps.Job(
        sized_model_config("8b", VOCABULARY) | {"num_hidden_layers": LAYERS},
        sequences=SEQUENCES,
        length=LENGTH,
    )
    programs = {
        name: steps.fourfold(
            job,
            shape,
            cluster_of(50.0),
            clips=False,
            optimizes=False,
            weights="streamed",
            precision="bf16",
            overlap=overlap,  # type: ignore[arg-type]
        )
        for name, overlap in VARIANTS[axis].items()
    }
    plain = programs["nothing"]
    compute_s = plain.work_s()
    cluster = balanced(plain, cluster_of, compute_s * SHARES[share])
    phases = plain.by_phase(steps.price_of(cluster))
    floor_s = sum(max(phase) for phase in phases)
    programs["communication"] = plain.without("work")
    scale = Scale(dilation=STEP_S / compute_s, payload=PAYLOAD)
    with Orchestra(cluster, 2, scale, programs) as orchestra:
        played = orchestra.play(rounds)
    alone_s = played.pop("communication").median_s
    return Result(axis, share, cluster.links.node_gbps, compute_s, alone_s, floor_s, played)


def show(result: Result) -> None:
    print(
        f"\n{result.axis} = 2, communication {result.share}: links of {result.node_gbps:.1f} GB/s; computation alone "
        f"{result.compute_s * 1e3:.1f} ms, communication alone {result.communication_s * 1e3:.1f} ms, floor {result.floor_s * 1e3:.1f} ms"
    )
    for name, played in result.played.items():
        print(
            f"    {name:31} {played}; {played.median_s / result.limit_s:.2f} x the longer of the two, "
            f"{result.times_floor(name):.2f} x the floor"
        )


def draw(results: list[Result], path: Path) -> None:
    """Each overlap in multiples of the floor, by axis; the threshold as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys(r.axis for r in results))
    figure, panels = plt.subplots(1, len(axes), figsize=(3.4 * len(axes), 4.4), squeeze=False, sharey=True)
    for panel, axis in zip(panels[0], axes, strict=True):
        own = [r for r in results if r.axis == axis]
        names = list(VARIANTS[axis])
        for number, (result, colour) in enumerate(zip(own, ("#4878a8", "#d0743c"), strict=False)):
            at = [i + 0.4 * (number - 0.5 * (len(own) - 1)) for i in range(len(names))]
            heights = [result.times_floor(name) for name in names]
            panel.bar(at, heights, width=0.38, color=colour, label=f"communication {result.share}")
        panel.axhline(1.0, color="black", linewidth=1)
        panel.axhline(THRESHOLDS[axis], color="black", linestyle="--", linewidth=1)
        panel.set_title(f"{axis} = 2", fontsize=10)
        panel.set_xticks(range(len(names)), names, rotation=35, ha="right")
    panels[0][0].margins(y=0.25)  # for the legend
    panels[0][0].set_ylabel("step / floor of one step's schedule")
    panels[0][-1].legend(fontsize=8, loc="upper right")
    figure.suptitle(
        "Two nodes of one device in slow motion; dashed: threshold. No GPU has run this", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", default=list(THRESHOLDS), choices=list(THRESHOLDS))
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, in turns (3)")
    parser.add_argument("--figure", type=Path, help="write the figure here (PNG or SVG)")
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason is not None:
        print(f"overlap: {reason}")
        return 2
    results = []
    for axis in options.axes:
        for share in SHARES:
            results.append(measure(axis, share, options.rounds))
            show(results[-1])
    if options.figure:
        draw(results, options.figure)
    past = [
        f"{r.axis} {r.share} {r.times_floor():.3f} > {THRESHOLDS[r.axis]:.2f}"
        for r in results
        if r.times_floor() > THRESHOLDS[r.axis]
    ]
    busiest = max(played.cpu for r in results for played in r.played.values())
    held = len(results) - len(past)
    print(f"\noverlap: {held}/{len(results)} within their thresholds {'; '.join(past)}")
    print(f"ranks took {busiest:.0%} of the cores, at most {MOST_CPU:.0%}")
    return 0 if not past and busiest <= MOST_CPU else 1


if __name__ == "__main__":
    sys.exit(main())
