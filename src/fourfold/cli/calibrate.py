"""`fourfold calibrate`: measure the current cluster, for `fourfold plan`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from fourfold.planner.inputs.cluster import to_toml

if TYPE_CHECKING:
    from fourfold.planner.calibrate.calibrate import Calibration


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure the current cluster, in minutes, and write a cluster file for plan",
        description="Measure collectives on every position of an axis, matmuls and memory, alone and overlapped, on all ranks; fit "
        "the planner's parameters and write them as a cluster file. Start it like a training run: torchrun "
        "--nnodes N --nproc-per-node M -m fourfold calibrate --out cluster.toml",
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

    result = calibrate(options.name or options.out.stem, budget_s=60 * options.minutes)
    if result is not None:
        options.out.write_text(as_file(result))
        show(result, Console(width=120))
        print(f"wrote {options.out}: fourfold plan MODEL --cluster {options.out} ...")
        sys.stdout.flush()
    return 0


def as_file(result: Calibration) -> str:
    """The cluster file, with the spread of each parameter in comments."""
    lines = [f"# Measured in {result.seconds:.0f} s. Medians; interquartile ranges in brackets."]
    lines += [f"# {p.name} = {p.value:.4g} [{p.spread:.2g}] {p.unit}" for p in result.parameters]
    return "\n".join(lines) + "\n" + to_toml(result.cluster)


def show(result: Calibration, console: Console) -> None:
    table = Table(title=f"{result.cluster.name}, measured in {result.seconds:.0f} s", title_justify="left")
    for heading in ("parameter", "fitted", "interquartile range", "unit"):
        table.add_column(heading, justify="left" if heading in ("parameter", "unit") else "right")
    for p in result.parameters:
        table.add_row(p.name, f"{p.value:.4g}", f"{p.spread:.2g}", p.unit)
    console.print(table)
    table = Table(
        title="formulas with these parameters, compared with each measurement", title_justify="left"
    )
    for heading in ("what", "measured", "formula", "off by"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for d in result.deviations:
        table.add_row(
            d.what, f"{d.measured_s * 1e3:.3f} ms", f"{d.formula_s * 1e3:.3f} ms", f"{d.error:+.0%}"
        )
    console.print(table)
    console.print(
        "A plan uses the measurements where there are any, and the formulas for other sizes and axes."
    )
