"""`fourfold train`: train as a rank of a launcher, or start ranks on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from fourfold.cli.arguments import add_changes, add_file, add_ranks
from fourfold.processes import CONTINUE, MAX_RESTARTS, is_rank, stop_with_agent

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model from a run config",
        description="Train a model from a run config (TOML). By itself it starts a rank for every device that the grid needs, or on "
        "the CPU; under torchrun or srun it joins the other ranks. Run the same command again after an interruption: it "
        "resumes from the newest checkpoint, also on another grid. If a rank dies, all ranks on this machine restart from "
        "the newest checkpoint; under torchrun its --max-restarts applies. On SIGINT, SIGTERM, or SIGUSR1 to the ranks, it "
        f"saves after the current step and the next, and exits with code {CONTINUE}.",
        epilog="Example: fourfold train run.toml --set grid.z=2 --set grid.x=2",
    )
    add_file(parser)
    add_changes(parser)
    add_ranks(parser)
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"how often to restart the ranks of this machine when one dies (default: {MAX_RESTARTS}); needs two or more ranks",
    )
    parser.add_argument(
        "--profile", metavar="STEPS", help="trace these steps for ui.perfetto.dev, such as 10:12"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fourfold.config.run_file import load_run

    changes = [*options.set]
    if options.profile is not None:
        changes.append(f'logging.profile_steps="{options.profile}"')
    config = load_run(options.file, changes)
    if is_rank():
        stop_with_agent()
        return _train(config)
    from fourfold.launch.local import check, local_ranks, start_ranks

    ranks = local_ranks(config, options.ranks)
    check(config)
    if ranks == 1:
        if options.max_restarts:
            raise ValueError(
                f"--max-restarts {options.max_restarts} has no effect on a grid of one rank, which runs without an agent; leave "
                "it out, or start it with python -m fourfold.launch.agent"
            )
        return _train(config)
    command = [str(options.file), *(f"--set={change}" for change in changes)]
    restarts = MAX_RESTARTS if options.max_restarts is None else options.max_restarts
    return start_ranks(ranks, ["train", *command], restarts)


def _train(config: RunConfig) -> int:
    from fourfold.train.recovery.stop import SIGNALS
    from fourfold.train.run import train  # torch takes seconds to import

    if train(config):
        return 0
    for number in SIGNALS:  # a second signal must not kill the exiting process
        signal.signal(number, signal.SIG_IGN)
    if os.environ.get("RANK", "0") == "0":
        print("stopped and saved; the same command, or job, resumes the run", file=sys.stderr)
    return CONTINUE
