"""The `fourfold` command line."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

import shtab

from fourfold.cli import (
    bench,
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
        data,  # in the order of a user's way
        init,
        plan,
        dryrun,
        bench,
        train,
        report,
        export,
        launch,
        checkpoint,
        drill,
        calibrate,
        doctor,
    ):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: int(options.run(options)))


def exit_code_of(work: Callable[[], int]) -> int:
    """The exit code of a command: errors of the user are fatal, errors of the machine may be gone after a restart."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except (ValueError, OSError) as error:  # anything else is a bug, and keeps its traceback
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 1
        print(f"fourfold: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, _NEEDS_A_PERSON) else 1


def _nobody_reads() -> bool:
    """Did the reader of our output end, as in `fourfold plan ... | head`? Then no more is written."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not any(state & select.POLLERR for _, state in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left at its exit
    return True


if __name__ == "__main__":
    sys.exit(main())
