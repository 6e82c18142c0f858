"""Does a cluster in slow motion repeat itself, and does what does not overlap add up?

Two nodes of two devices with the links of a DGX H100. The steps of four layouts are played five times each, in turns. With
nothing overlapped a step has to take its computation and its communication, one after another.

    python -m benchmarks.slow_motion.repeat

Thresholds: a spread (the whole range) of 2 %, a sum that is right within 3 %, and ranks that take at most 60 % of the cores.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from benchmarks.cluster import why_not
from benchmarks.slow_motion import steps
from benchmarks.slow_motion.conductor import Orchestra, report
from benchmarks.slow_motion.machines import Scale
from fourfold import Overlap
from fourfold.config.describe import sized_model_config
from fourfold.planner.inputs.cluster import preset

SPREAD, SUM = 0.02, 0.03
STEPS = 5
SCALE = Scale(dilation=40.0, payload=100.0)
LAYOUTS = {"x": (2, 1, 1, 2), "y": (2, 1, 2, 1), "z": (1, 4, 1, 1), "data": (4, 1, 1, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=STEPS, help=f"steps of each, in turns ({STEPS})")
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason is not None:
        print(f"slow_motion.repeat: {reason}")
        return 2
    whole = preset("dgx-h100")
    cluster = replace(
        whole, links=replace(whole.links, devices_per_node=2, node_gbps=whole.links.node_gbps / 4)
    )
    job = steps.Job(sized_model_config("8b", 32_000) | {"num_hidden_layers": 2}, sequences=8, length=2048)
    programs = {}
    for axis, shape in LAYOUTS.items():
        for name, overlap in (("everything", Overlap()), ("nothing", Overlap.none())):
            programs[f"{axis}, {name} overlapped"] = steps.fourfold(
                job, shape, cluster, weights="streamed", precision="bf16", overlap=overlap
            )
        program = programs[f"{axis}, nothing overlapped"]
        programs[f"{axis}, communication"] = program.without("work")
    with Orchestra(cluster, 2, SCALE, programs) as orchestra:
        machines = orchestra.machines
        inside, between = machines.measured_mbit()
        print(
            f"links inside a node set to {machines.device_mbit:.0f} Mbit/s, measured {inside:.0f}; of a node "
            f"{machines.node_mbit:.0f}, measured {between:.0f}"
        )
        played = orchestra.play(options.rounds)
    is_idle = report(played)
    worst = max(result.spread for result in played.values())
    errors = {}
    for axis in LAYOUTS:
        nothing = f"{axis}, nothing overlapped"
        parts_s = programs[nothing].work_s() + played[f"{axis}, communication"].median_s
        errors[axis] = played[nothing].median_s / parts_s - 1
    sums = ", ".join(f"{axis} {error:+.1%}" for axis, error in errors.items())
    print(f"nothing overlapped against computation + communication: {sums}; at most {SUM:.0%}")
    print(f"spread: at most {worst:.1%}; threshold {SPREAD:.0%}")
    busiest = max(result.cpu for result in played.values())
    print(f"ranks took {busiest:.0%} of the cores")
    is_good = worst <= SPREAD and max(map(abs, errors.values())) <= SUM
    return 0 if is_idle and is_good else 1


if __name__ == "__main__":
    sys.exit(main())
