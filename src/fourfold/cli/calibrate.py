"""`fourfold calibrate`: measure the current cluster, for `fourfold plan`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure the current cluster, in minutes, and write a cluster file for plan",
        description="Measure collectives on every position of an axis, matmuls and memory, alone and overlapped, on all ranks; fit "
        "the planner's parameters and write them as a cluster file. Start it like a training run: torchrun "
        "--nnodes N --nproc-per-node M -m fourfold calibrate --out cluster.toml",
        epilog="Example: torchrun --nproc-per-node 8 -m fourfold calibrate --out cluster.toml",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the cluster file to write (TOML)"
    )
    parser.add_argument("--name", help="name of the cluster (default: the name of the file)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="start no new measurement after this time; the rest is fitted (default: 5)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if "RANK" not in os.environ:
        raise ValueError(
            "calibrate runs on all ranks of a cluster, and RANK is not set; start it with torchrun --nnodes N "
            "--nproc-per-node M -m fourfold calibrate --out cluster.toml"
        )
    if options.minutes <= 0:
        raise ValueError(f"--minutes {options.minutes} leaves no time to measure; use more than 0")
    from fourfold.planner.calibrate.calibrate import calibrate  # torch takes seconds to import
    from fourfold.planner.show.calibration import as_file, show

    result = calibrate(options.name or options.out.stem, budget_s=60 * options.minutes)
    if result is not None:
        options.out.write_text(as_file(result))
        print(
            f"{show(result)}wrote {options.out}: fourfold plan MODEL --cluster {options.out} ...", flush=True
        )
    return 0
