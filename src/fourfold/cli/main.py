"""`fourfold COMMAND`: where the commands come together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from fourfold.cli import calibrate, checkpoint, data, drill, dryrun, export, init, launch, plan, report, train
from fourfold.processes import REFUSED

# Unlike a disk that is full, a file system that does not answer, or a checkpoint that was not saved for it.
_MENDED_BY_HAND = (
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_to(commands)
    dryrun.add_to(commands)
    calibrate.add_to(commands)
    checkpoint.add_to(commands)
    export.add_to(commands)
    data.add_to(commands)
    init.add_to(commands)
    train.add_to(commands)
    report.add_to(commands)
    launch.add_to(commands)
    drill.add_to(commands)
    options = parser.parse_args(arguments)
    return status_of(lambda: int(options.run(options)))


def status_of(work: Callable[[], int]) -> int:
    """What a command ends with. What a person has to mend is refused; what a machine did may be over at the next try."""
    try:
        return work()
    except (ValueError, OSError) as error:  # anything else is a defect, and keeps its trace
        print(f"fourfold: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, _MENDED_BY_HAND) else 1


if __name__ == "__main__":
    sys.exit(main())
