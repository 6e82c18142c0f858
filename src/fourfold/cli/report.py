"""`fourfold report`: the page of a run, from the files that it left."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write the page of a run from its logs",
        description="Write report.html from the run.json and metrics.jsonl in a run's log folder: also of a run that "
        "still goes on, or that was killed. A cluster adds the prediction, which takes a dry run.",
    )
    parser.add_argument("folder", type=Path, help="what [logging] folder of the run's file names")
    parser.add_argument(
        "--cluster", help="predict on this preset or TOML file (default: grid.cluster of the run's file)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fourfold.train.observe.report import write_report
    from fourfold.train.observe.run_metadata import read_run_metadata

    given = read_run_metadata(options.folder)["config"]["grid"]["cluster"]
    print(f"wrote {write_report(options.folder, options.cluster or given)}")
    return 0
