"""`fourfold report`: write the HTML report of a run from its logs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write the HTML report of a run from its logs",
        description="Write report.html from the run.json and metrics.jsonl in a run's log folder, also while the run is "
        "training, or after it was killed. With a cluster, the report includes the prediction, which needs a dry run.",
        epilog="Example: fourfold report run/logs",
    )
    parser.add_argument("folder", type=Path, help="the run's log folder, logging.folder of the run config")
    parser.add_argument(
        "--cluster", help="a preset or TOML file to predict for (default: grid.cluster of the run config)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fourfold.train.observe.report import write_report
    from fourfold.train.observe.run_metadata import read_run_metadata

    given = read_run_metadata(options.folder)["config"]["grid"]["cluster"]
    print(f"wrote {write_report(options.folder, options.cluster or given)}")
    return 0
