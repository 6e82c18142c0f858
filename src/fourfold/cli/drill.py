"""`fourfold drill`: inject faults into a short run, and check that it recovers exactly."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.arguments import add_changes, add_file, add_ranks, add_repeated
from fourfold.processes import CONTINUE, is_rank, stop_with_agent

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig
    from fourfold.drill.drill import Launch
    from fourfold.drill.fault import Fault


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "drill",
        help="inject faults into a short run, before the long one",
        description="Train a few steps of a run config on this machine, then again with ranks killed, stopped and slowed, "
        "disks full, checkpoints damaged and values corrupted; after each fault, the run has to end as the undisturbed one "
        "did, bit for bit. The exit code is 1 if any scenario fails. Under torchrun or srun, the ranks that were started "
        "train, disturbed once by --fault: on a cluster, start it without a fault first, then with one, and compare with "
        "`fourfold drill FILE --compare`.",
        epilog="Example: fourfold drill run.toml --set grid.data=2",
    )
    add_file(parser)
    add_changes(parser)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("drill"),
        help="folder for all files of the drill; emptied at the start if a drill wrote it, rejected otherwise (default: "
        "drill)",
    )
    add_ranks(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed that chooses the ranks and steps of the faults (default: 0)"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=20.0,
        help="how long ranks wait for a stopped one; has to be longer than a step (default: 20)",
    )
    actions = "kill, stop, slow, nan, spike, flip, eio or enospc"
    what = f"inject only this fault, such as kill:at=optimizer,rank=1,step=4 ({actions})"
    add_repeated(parser, "--fault", "FAULT", what)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare the checkpoints of a disturbed and an undisturbed run on a cluster",
    )
    # For the ranks that a drill itself starts: --set has all changes of the run config.
    parser.add_argument("--started-here", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fourfold.config.run_file import load_run
    from fourfold.drill.fault import Fault

    faults = [Fault.parse(text) for text in options.fault]
    if options.compare:  # also in a step of Slurm
        from fourfold.drill.cluster import judge

        wrong, well = judge(options.folder, faults)
        print("\n".join(wrong) or well)
        return 1 if wrong else 0
    if is_rank():
        return _as_rank(options, faults)
    from fourfold.launch.local import check, local_ranks, run_ranks

    config = load_run(options.file, options.set)
    _reject_lighthouse(config)
    ranks = local_ranks(config, options.ranks)
    check(config)
    count = itertools.count(1)

    def launch(changes: Sequence[str], faults: Sequence[Fault]) -> int:
        arguments = ["drill", str(options.file), "--started-here"]
        arguments += [f"--set={change}" for change in (*options.set, *changes)]
        arguments += [f"--fault={fault}" for fault in faults]
        return run_ranks(ranks, arguments, options.folder / f"ranks-{next(count):02d}.log")

    return drill(options, config, ranks, faults, launch)


def drill(
    options: argparse.Namespace, config: RunConfig, ranks: int, faults: Sequence[Fault], launch: Launch
) -> int:
    """Run all scenarios, or one for each given fault, and print a line for each."""
    from fourfold.drill.drill import clear
    from fourfold.drill.drill import drill as outcomes
    from fourfold.drill.scenario import check_fault, scenario_for, scenarios

    for fault in faults:
        check_fault(fault, ranks, config.grid.data)
    wanted = [scenario_for(fault, options.timeout_s) for fault in faults]
    wanted = wanted or scenarios(ranks, config.grid.data, options.seed, options.timeout_s)
    clear(options.folder)
    bad = 0
    for outcome in outcomes(options.folder.resolve(), wanted, launch, seed=options.seed):
        bad += bool(outcome.wrong)
        print(
            f"{'WRONG' if outcome.wrong else 'right'}  {outcome.seconds:6.1f} s  {outcome.name}  {outcome.fault}",
            flush=True,
        )
        for line in outcome.wrong:
            print(f"       {line}", flush=True)
    print(f"{bad} scenarios failed; logs are in {options.folder}" if bad else "all scenarios succeeded")
    return 1 if bad else 0


def _as_rank(options: argparse.Namespace, faults: Sequence[Fault]) -> int:
    """Train as a rank of a drill on this machine, or on a cluster."""
    from fourfold.config.run_file import load_run
    from fourfold.drill.cluster import begin
    from fourfold.drill.drill import NOTES, without_trackers
    from fourfold.drill.injector import Injector
    from fourfold.train.run import train

    stop_with_agent()
    if options.started_here:
        config = without_trackers(load_run(options.file, options.set))
    else:
        config = begin(options.file, options.set, options.folder, faults, options.timeout_s)
    _reject_lighthouse(config)
    # With a launcher that restarts ranks, a fault happens once.
    done = train(config, [Injector(faults, record=config.logging.folder / NOTES)])
    return 0 if done else CONTINUE


def _reject_lighthouse(config: RunConfig) -> None:
    if config.reliability.torchft_lighthouse is not None:
        raise ValueError(
            "a drill runs one job, and reliability.torchft_lighthouse would let it join the replicas of a run; use a run config "
            "without it"
        )
