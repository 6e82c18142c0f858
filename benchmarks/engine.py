"""What does the engine win against PyTorch's own parts, on the same layout?

Training steps (forward, backward, AdamW) of four blocks of Llama 8B in bf16, on a cluster in slow motion (`benchmarks.slow_motion`), each
pair in turns in one run. PyTorch's side has FSDP2 with prefetch on its streams, and `parallelize_module` with sequence parallelism and
`loss_parallel`, in PyTorch's styles and in Megatron's schedule (`benchmarks.baseline`).

    x       x = 2 / `parallelize_module`, in a node                                      at most 0.95
    z       z = 2, fsdp2 weights / FSDP2, in a node                                      at most 1.02
    z2, z4  z = 2 and z = 4, streamed weights / FSDP2: in a node                         at most 1.02
                                                       between two nodes                 at most 0.90
    data    data = 2 / FSDP2 of one shard, which stands for DDP, between two nodes       at most 1.02

Between nodes the links have the rate at which the communication of ours alone takes as long as its computation alone. The floor of a step
there has forward, backward and AdamW one after another, and in each of the first two the longer of computation and communication.

    python -m benchmarks.engine
    python -m benchmarks.engine --only x data
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from benchmarks.baseline import Layout, Tensors
from benchmarks.cluster import why_not
from benchmarks.slow_motion import steps
from benchmarks.slow_motion.conductor import MOST_CPU, Orchestra, Played
from benchmarks.slow_motion.proportions import balanced, cluster_of, scale_of
from fourfold import Overlap
from fourfold.config.describe import sized_model_config
from fourfold.planner.inputs.cluster import Cluster

JOB = steps.Job(
    sized_model_config("8b", 32_000) | {"num_hidden_layers": 4, "tie_word_embeddings": False},
    sequences=8,
    length=1024,
)
STEP_S = 2.0  # of the fastest, here


@dataclass(frozen=True)
class Part:
    what: str
    nodes: int
    shape: steps.Shape
    threshold: float
    options: dict[str, Any]

    @property
    def layout(self) -> Layout:
        data, z, _, x = self.shape
        return Layout(data, z, x)


STREAMED: dict[str, Any] = {"weights": "streamed"}
SPLIT: dict[str, Any] = STREAMED | {"overlap": Overlap(interleave=True)}
PARTS = {
    "x": Part("x = 2 / parallelize_module", 1, (1, 1, 1, 2), 0.95, SPLIT),
    "z": Part("z = 2, fsdp2 / FSDP2", 1, (1, 2, 1, 1), 1.02, {"weights": "fsdp2"}),
    "z2": Part("z = 2, streamed / FSDP2", 1, (1, 2, 1, 1), 1.02, STREAMED),
    "z4": Part("z = 4, streamed / FSDP2", 1, (1, 4, 1, 1), 1.02, STREAMED),
    "z2-nodes": Part("z = 2, streamed / FSDP2, two nodes", 2, (1, 2, 1, 1), 0.90, STREAMED),
    "z4-nodes": Part("z = 4, streamed / FSDP2, two nodes", 2, (1, 4, 1, 1), 0.90, STREAMED),
    "data": Part("data = 2 / DDP, two nodes", 2, (2, 1, 1, 1), 1.02, STREAMED),
}


def measure(part: Part, rounds: int) -> tuple[Cluster, float, dict[str, Played]]:
    """The cluster, the floor of a step between its nodes, and what was played."""
    per_node = part.layout.world // part.nodes
    cluster = cluster_of("dgx-h100", per_node)
    make = partial(steps.fourfold, JOB, part.shape, cluster, clips=False, precision="bf16")
    ours = make(**part.options)
    floor_s = 0.0
    if part.nodes > 1:

        def with_rate(gbps: float) -> Cluster:
            return replace(cluster, links=replace(cluster.links, node_gbps=gbps))

        cluster = balanced(ours, with_rate, ours.work_s())
        plain = part.options | {"overlap": Overlap.none()}
        trained, apart = make(**plain), make(optimizes=False, **plain)
        floor_s = sum(map(max, apart.by_phase(steps.price_of(cluster)))) + trained.work_s() - apart.work_s()
    programs = {"ours": ours}
    for tensors in get_args(Tensors) if part.layout.tensor > 1 else ("replicated",):
        programs[f"theirs, {tensors}"] = steps.stock(JOB, part.layout, cluster, tensors=tensors)
    scale = scale_of(cluster, ours.work_s(), STEP_S)
    with Orchestra(cluster, part.nodes, scale, programs) as orchestra:
        return cluster, floor_s, orchestra.play(rounds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, in turns (3)")
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason is not None:
        print(f"engine: {reason}")
        return 2
    print("training steps of four blocks of Llama 8B in slow motion, 8 x 1,024 tokens; no GPU has run this")
    good, busiest = 0, 0.0
    for name in options.only:
        part = PARTS[name]
        cluster, floor_s, played = measure(part, options.rounds)
        theirs = min((w for w in played if w != "ours"), key=lambda w: played[w].median_s)
        ratio = played["ours"].median_s / played[theirs].median_s
        rate = ""
        if part.nodes > 1:
            rate = f", links of {cluster.links.node_gbps:.1f} GB/s, floor {floor_s * 1e3:.2f} ms"
            rate += f" ({floor_s / played[theirs].median_s:.3f})"
        verdict = "" if ratio <= part.threshold else "   MISSED"
        print(f"{part.what}: {ratio:.3f} (at most {part.threshold:.2f}){rate}{verdict}")
        for words, result in played.items():
            print(f"    {words:26} {result}", flush=True)
        good += ratio <= part.threshold
        busiest = max(busiest, *(result.cpu for result in played.values()))
    print(f"engine: {good}/{len(options.only)} parts within their thresholds")
    print(f"ranks took {busiest:.0%} of the cores, at most {MOST_CPU:.0%}")
    return 0 if good == len(options.only) and busiest <= MOST_CPU else 1


if __name__ == "__main__":
    sys.exit(main())
