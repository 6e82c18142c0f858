"""`fourfold checkpoint`: inspect and verify checkpoints, without starting a rank."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify and show checkpoints",
        description="Inspect the checkpoints in a folder or under an fsspec URL. Loading them never executes code.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _action(actions, "ls", "list the checkpoints, and whether their files exist")
    verify = _action(actions, "verify", "hash every file and compare it with the manifest")
    info = _action(actions, "info", "show the contents of a checkpoint")
    for action, default in ((verify, "all"), (info, "the newest")):
        action.add_argument("--step", type=int, help=f"the step of the checkpoint (default: {default})")
    info.add_argument("--tensors", action="store_true", help="list every tensor")


def _action(actions: Any, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=what, description=what, epilog=f"Example: fourfold checkpoint {name} run/checkpoints"
    )
    parser.add_argument(
        "folder", help="the folder of the run's checkpoints, or an fsspec URL such as s3://bucket/run"
    )
    parser.set_defaults(run=run, action=name)
    return parser


def run(options: argparse.Namespace) -> int:
    from fourfold.checkpoint import inspect

    if options.action == "ls":
        inspect.list_all(options.folder)
    elif options.action == "info":
        inspect.show(options.folder, options.step, with_tensors=options.tensors)
    elif not inspect.verify(options.folder, options.step):
        return 1
    return 0
