"""`fourfold bench`: measure a run config on the available devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.arguments import add_changes, add_file, add_ranks
from fourfold.processes import is_rank, stop_with_agent

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a run config on the available devices, in minutes, beside its prediction",
        description="Train a run config for a few steps with random weights on random tokens, and measure tokens per second, MFU, "
        "exposed communication and memory. Writes a page to share, with the plan's prediction beside what was measured, and "
        "its numbers as JSON. It reads no data and saves no checkpoint. Like train, it starts a rank for every device, or "
        "joins the others under torchrun or srun.",
        epilog="Example: fourfold bench run.toml --minutes 5 --out bench.html",
    )
    add_file(parser)
    add_changes(parser)
    add_ranks(parser)
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="how long to measure, at most 50 steps and at least 5 (default: 10)",
    )
    parser.add_argument(
        "--cluster",
        help="a preset or TOML file to predict for (default: grid.cluster of the run config, or the preset with these devices)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench.html"), metavar="FILE", help="the page (default: bench.html)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fourfold.config.run_file import load_run

    if options.minutes <= 0:
        raise ValueError(f"--minutes {options.minutes:g} leaves no time to measure; use more than 0")
    config = load_run(options.file, options.set)
    if is_rank():
        stop_with_agent()
        return _bench(config, options)
    from fourfold.launch.local import check_model, local_ranks, start_ranks

    ranks = local_ranks(config, options.ranks)
    check_model(config)
    if ranks == 1:
        return _bench(config, options)
    given = [f"--set={change}" for change in options.set] + [
        f"--minutes={options.minutes}",
        f"--out={options.out}",
    ]
    if options.cluster is not None:
        given.append(f"--cluster={options.cluster}")
    return start_ranks(ranks, ["bench", str(options.file), *given])


def _bench(config: RunConfig, options: argparse.Namespace) -> int:
    from fourfold.bench.measure import bench  # torch takes seconds to import
    from fourfold.bench.report import Results

    found = bench(config, options.minutes)
    if found is not None:
        results = Results(found, options.cluster or config.grid.cluster)
        print(results, flush=True)
        results.write(options.out)
        print(f"wrote {options.out} and {options.out.with_suffix('.json')}", flush=True)
    return 0
