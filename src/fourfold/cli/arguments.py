"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the run config (TOML); `fourfold init` writes one")


def add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="change a field of the run config, such as optimizer.lr=3e-4; can be repeated",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        help="number of ranks on this machine, with grid.auto (default: the number of GPUs)",
    )
