"""`fourfold drill`: break a short run on purpose, and see whether it comes back as it was."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.arguments import add_changes, add_file, add_ranks
from fourfold.processes import CONTINUE, is_rank

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig
    from fourfold.drill.drill import Launch
    from fourfold.drill.fault import Fault


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "drill",
        help="break a short run on purpose, before the long one",
        description="Train a few steps of a run's file on this machine, then again with ranks killed, stopped and slowed, "
        "disks full, checkpoints damaged and numbers spoilt; after each, the run has to end as the undisturbed one did, bit for "
        "bit. Exit status 1 if anything is not as it should be. Under torchrun or srun the ranks that are there train, "
        "disturbed by --fault once: on a cluster, start it without a fault first, then with one, and compare with "
        "`fourfold drill FILE --compare`.",
    )
    add_file(parser)
    add_changes(parser)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("drill"),
        help="for all that it writes (drill); emptied at the start if a drill wrote it, and refused otherwise",
    )
    add_ranks(parser)
    parser.add_argument("--seed", type=int, default=0, help="of which ranks and steps are disturbed (0)")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=20.0,
        help="that ranks wait for one that is stopped; more than a step takes (20)",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="disturb this alone, such as kill:at=optimizer,rank=1,step=4 (kill, stop, slow, nan, spike, flip, eio or enospc)",
    )
    parser.add_argument(
        "--compare", action="store_true", help="the checkpoints of two runs of a cluster, disturbed and not"
    )
    # For the ranks that a drill itself starts: the changes are all that there is to the run.
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
    from fourfold.launch.local import check, local_ranks

    config = load_run(options.file, options.set)
    _refuse_replicas(config)
    ranks = local_ranks(config, options.ranks)
    check(config)
    return drill(options, config, ranks, faults, in_processes(options, ranks))


def drill(
    options: argparse.Namespace, config: RunConfig, ranks: int, faults: Sequence[Fault], launch: Launch
) -> int:
    """All exercises, or one for each fault that was given; a line for each."""
    from fourfold.drill.drill import clear
    from fourfold.drill.drill import drill as outcomes
    from fourfold.drill.scenario import exercise_of, exercises, refuse

    for fault in faults:
        refuse(fault, ranks, config.grid.data)
    wanted = [exercise_of(fault, options.timeout_s) for fault in faults]
    wanted = wanted or exercises(ranks, config.grid.data, options.seed, options.timeout_s)
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
    print(
        "all is as it should be"
        if not bad
        else f"{bad} of these are not as they should be; logs are in {options.folder}"
    )
    return 1 if bad else 0


def in_processes(options: argparse.Namespace, ranks: int) -> Launch:
    """Ranks of this machine, under torchrun's launcher, as `fourfold train` starts them."""
    count = 0

    def launch(changes: Sequence[str], faults: Sequence[Fault]) -> int:
        nonlocal count
        count += 1
        cores = len(os.sched_getaffinity(0))
        environment = {"OMP_NUM_THREADS": str(max(1, cores // ranks))} | os.environ
        command = [sys.executable, "-m", "fourfold.launch.agent", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "fourfold", "drill", str(options.file), "--started-here"]
        command += [f"--set={change}" for change in (*options.set, *changes)]
        command += [f"--fault={fault}" for fault in faults]
        with (options.folder / f"ranks-{count:02d}.log").open("wb") as log:
            return subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode

    return launch


def _as_rank(options: argparse.Namespace, faults: Sequence[Fault]) -> int:
    """Of a drill on this machine, or on a cluster."""
    from fourfold.config.run_file import load_run
    from fourfold.drill.cluster import begin
    from fourfold.drill.drill import NOTES, without_trackers
    from fourfold.drill.injector import Injector
    from fourfold.train.run import train

    if options.started_here:
        config = without_trackers(load_run(options.file, options.set))
    else:
        config = begin(options.file, options.set, options.folder, faults, options.timeout_s)
    _refuse_replicas(config)
    # With a launcher that starts ranks again, a fault happens once.
    done = train(config, [Injector(faults, spent=config.logging.folder / NOTES)])
    return 0 if done else CONTINUE


def _refuse_replicas(config: RunConfig) -> None:
    if config.reliability.lighthouse is not None:
        raise ValueError(
            "a drill is of one job, and reliability.lighthouse would have it join the replicas of a run; use a file without it"
        )
