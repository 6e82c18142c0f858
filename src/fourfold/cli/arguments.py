"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the run config (TOML); `fourfold init` writes one")


def add_changes(parser: argparse.ArgumentParser) -> None:
    what = "change a field of the run config, such as optimizer.lr=3e-4"
    add_repeated(parser, "--set", "SECTION.FIELD=VALUE", what)


def add_repeated(parser: argparse.ArgumentParser, option: str, metavar: str, what: str) -> None:
    """An option that can be given several times; its values are a list."""
    what = f"{what}; can be repeated"
    parser.add_argument(option, action="append", default=[], metavar=metavar, help=what)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        help="number of ranks on this machine, with grid.auto (default: the number of GPUs)",
    )
