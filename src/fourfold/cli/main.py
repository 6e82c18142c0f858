"""The `fourfold` command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

import shtab

from fourfold.cli import (
    calibrate,
    checkpoint,
    data,
    doctor,
    drill,
    dryrun,
    export,
    init,
    launch,
    plan,
    report,
    train,
)
from fourfold.processes import REFUSED

# A restart does not help here, unlike after a full disk, a file system that does not respond, or a failed save.
_NEEDS_A_PERSON = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fourfold", description="4D parallel training, planned before it runs."
    )
    parser.add_argument("--version", action="version", version=f"fourfold {version('fourfold')}")
    shtab.add_argument_to(
        parser,
        "--print-completion",
        help='print completion for a shell: eval "$(fourfold --print-completion bash)"',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (
        plan,
        dryrun,
        calibrate,
        checkpoint,
        export,
        data,
        init,
        train,
        report,
        launch,
        drill,
        doctor,
    ):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: int(options.run(options)))


def exit_code_of(work: Callable[[], int]) -> int:
    """The exit code of a command: errors of the user are fatal, errors of the machine may be gone after a restart."""
    try:
        return work()
    except (ValueError, OSError) as error:  # anything else is a bug, and keeps its traceback
        print(f"fourfold: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, _NEEDS_A_PERSON) else 1


if __name__ == "__main__":
    sys.exit(main())
