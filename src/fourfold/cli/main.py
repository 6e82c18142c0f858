"""`fourfold COMMAND`: where the commands come together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fourfold.cli import calibrate, checkpoint, data, drill, dryrun, export, init, launch, plan, report, train


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
    try:
        return int(options.run(options))
    except (
        ValueError,
        OSError,
    ) as error:  # what a person can mend; anything else is a defect and keeps its trace
        print(f"fourfold: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
