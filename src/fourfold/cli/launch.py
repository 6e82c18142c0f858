"""`fourfold launch slurm` and `fourfold launch kubernetes`: start a run config as a cluster job."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

from fourfold.cli.arguments import add_changes, add_file, add_repeated, positive
from fourfold.processes import MAX_RESTARTS


def add_to(commands: Any) -> None:
    parser = commands.add_parser("launch", help="start a run on a cluster")
    systems = parser.add_subparsers(required=True, metavar="SYSTEM")
    _add_slurm(systems)
    _add_kubernetes(systems)


def _add_slurm(systems: Any) -> None:
    parser = systems.add_parser(
        "slurm",
        help="write a batch script, and submit it",
        description="Write a script for sbatch, and submit it. Before the time limit the run saves and is requeued, "
        "until it has finished.",
        epilog="Example: fourfold launch slurm run.toml --nodes 4 --gpus-per-node 8",
    )
    _add_world(parser)
    parser.add_argument(
        "--time", help="time limit of each start, in sbatch's format (default: the partition's)"
    )
    parser.add_argument("--partition", help="partition of the job (default: the cluster's)")
    parser.add_argument("--account", help="account to charge (default: yours)")
    parser.add_argument("--constraint", help="required node features")
    other = "any other option of sbatch, such as qos=high or exclusive"
    add_repeated(parser, "--sbatch", "NAME=VALUE", other)
    add_repeated(parser, "--setup", "COMMAND", "a shell command before the run, such as 'module load cuda'")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="working directory of the job (default: this one)"
    )
    parser.add_argument(
        "--logs", type=Path, help="folder for the logs (default: logging.folder of the run config)"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="Python interpreter on the nodes (default: this one)"
    )
    parser.add_argument(
        "--max-requeues", type=int, default=100, help="how often to requeue the job (default: 100)"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=MAX_RESTARTS,
        help=f"how often to restart the ranks within a start of the job, when one dies (default: {MAX_RESTARTS})",
    )
    parser.add_argument("--out", type=Path, help="the script to write (default: next to the run config)")
    parser.add_argument("--dry-run", action="store_true", help="write the script, but do not submit it")
    parser.add_argument("--print", action="store_true", help="only print the script")
    parser.set_defaults(run=slurm)


def _add_kubernetes(systems: Any) -> None:
    parser = systems.add_parser(
        "kubernetes",
        help="write the manifest of a JobSet",
        description="Write a manifest for kubectl apply: a JobSet with a pod for each node, and the run config in a "
        "ConfigMap. The cluster needs the JobSet controller.",
        epilog="Example: fourfold launch kubernetes run.toml --nodes 4 --gpus-per-node 8 --image IMAGE --claim data",
    )
    _add_world(parser)
    parser.add_argument("--image", required=True, help="container image with fourfold installed")
    parser.add_argument(
        "--claim",
        metavar="NAME[:PATH]",
        help="a PersistentVolumeClaim that all pods can write, and where it is mounted (default path: /data)",
    )
    parser.add_argument(
        "--folder", type=Path, help="working directory, for relative paths (default: the claim's path)"
    )
    parser.add_argument(
        "--gpu-resource", default="nvidia.com/gpu", help="resource name of GPUs (default: nvidia.com/gpu)"
    )
    parser.add_argument("--cpus", help="CPUs per pod, such as 32")
    parser.add_argument("--memory", help="memory per pod, such as 256Gi")
    parser.add_argument("--shared-memory", default="16Gi", help="size of /dev/shm of a pod (default: 16Gi)")
    add_repeated(parser, "--node-selector", "LABEL=VALUE", "label of the nodes to use")
    parser.add_argument(
        "--max-restarts", type=int, default=10, help="how often to restart after failures (default: 10)"
    )
    parser.add_argument("--out", type=Path, help="the manifest to write (default: standard output)")
    parser.set_defaults(run=kubernetes)


def _add_world(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--nodes", type=positive, required=True, help="number of nodes")
    parser.add_argument(
        "--gpus-per-node",
        type=positive,
        help="GPUs per node, with a rank on each (default: the grid's ranks per node)",
    )
    parser.add_argument(
        "--ranks-per-node", type=positive, help="ranks per node; without --gpus-per-node they run on CPUs"
    )
    add_changes(parser)
    parser.add_argument("--name", help="name of the job (default: the name of the run config)")
    parser.add_argument(
        "--grace-period",
        dest="grace_period_s",
        metavar="SECONDS",
        type=int,
        default=120,
        help="grace period: seconds in which the run saves, before the time limit or before a pod is killed (default: 120)",
    )


def slurm(options: argparse.Namespace) -> int:
    from fourfold.launch.slurm import SlurmJob, render, submit
    from fourfold.launch.world import train_command

    folder = options.folder.resolve()
    config, world = _checked(options, folder)
    logs = folder / (options.logs or config.logging.folder)
    common = _given(options, "time", "partition", "account", "constraint")
    job = SlurmJob(
        world,
        train_command(options.file.resolve(), options.set),
        name=options.name or options.file.stem,
        folder=folder,
        logs=logs,
        options={
            **{name: value for name, value in common.items() if value is not None},
            **dict(_pair(text) for text in options.sbatch),
        },
        **_given(options, "python", "setup", "grace_period_s", "max_requeues", "max_restarts"),
    )
    script = render(job)
    if not job.options.keys() & {"cpus-per-task", "cpus-per-gpu", "exclusive"}:
        print(
            f"note: Slurm may give each task one core, for {world.ranks_per_node} ranks; --sbatch cpus-per-task=N sets it",
            file=sys.stderr,
        )
    if options.print:
        print(script, end="")
        return 0
    out = options.out or options.file.with_suffix(".sbatch")
    out.write_text(script)
    if options.dry_run:
        logs.mkdir(parents=True, exist_ok=True)  # Slurm does not create it
        print(f"wrote {out}; submit it with: sbatch {out}")
        return 0
    number = submit(out, logs)
    print(f"submitted {out} as job {number}; it writes to {logs}/slurm-{number}.out and {logs}/{number}/")
    return 0


def kubernetes(options: argparse.Namespace) -> int:
    from fourfold.launch.kubernetes import KubernetesJob, manifest

    # The model and the cluster file may be on the volume: then the planner runs when the job starts.
    config, world = _checked(options)
    claim, _, path = (options.claim or "").partition(":")
    path = path or "/data"
    _check_checkpoints_persist(config.checkpoints.folder, Path(path) if claim else None, options.folder)
    job = KubernetesJob(
        world,
        run=options.file.read_text(),
        changes=options.set,
        name=options.name or re.sub("[^a-z0-9]+", "-", options.file.stem.lower()).strip("-"),
        claim=claim or None,
        claim_path=Path(path),
        node_selector={name: value or "" for name, value in map(_pair, options.node_selector)},
        **_given(options, "image", "folder", "gpu_resource", "cpus", "memory"),
        **_given(options, "shared_memory", "grace_period_s", "max_restarts"),
    )
    text = manifest(job)
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
        print(f"wrote {options.out}; start it with: kubectl apply -f {options.out}")
    return 0


def _checked(options: argparse.Namespace, folder: Path | None = None) -> tuple[Any, Any]:
    """The run config and its world; errors are raised before the job waits in a queue. ``folder``: where its relative paths
    start, if it is on this machine."""
    from fourfold.config.run_file import load_run
    from fourfold.launch.world import world_of

    config = load_run(options.file, options.set)
    if not config.checkpoints.resume:
        raise ValueError(
            "checkpoints.resume is false: a restarted job would begin at step 0; "
            "use --set checkpoints.resume=true"
        )
    grid = config.grid
    world = world_of(
        grid if grid.auto else grid.model_copy(update={"data": config.shape[0]}),
        options.nodes,
        ranks_per_node=options.ranks_per_node,
        gpus_per_node=options.gpus_per_node,
    )
    if folder is not None:
        with chdir(folder):
            _check_data(config)
    if grid.auto and (folder is not None or grid.cluster is None):
        from fourfold.train.auto_layout import choose_layout  # torch takes seconds to import

        with chdir(folder or Path.cwd()):
            chosen = choose_layout(config, world.ranks).grid
        how = f"planned for {grid.cluster}" if grid.cluster else "all ranks on z"
        print(
            f"the run config sets no grid; {world.ranks} ranks get data={chosen.data} z={chosen.z} y={chosen.y} "
            f"x={chosen.x} ({how})",
            file=sys.stderr,
        )
    return config, world


def _check_data(config: Any) -> None:
    """Reject what every rank would reject, unless the data or the model is where only the nodes see it."""
    from fourfold.data.manifest import NAME
    from fourfold.launch.local import check

    absent = [str(source.path) for source in config.data.sources if not (Path(source.path) / NAME).exists()]
    model = config.model.pretrained or config.model.config
    if not absent and Path(model).exists():
        check(config)
    elif absent:
        print(
            f"warning: {', '.join(absent)} is not a prepared data set on this machine; the job checks it when it starts",
            file=sys.stderr,
        )
    if not Path(model).exists():
        print(
            f"warning: there is no {model} on this machine; the job looks for it there and on the hub",
            file=sys.stderr,
        )


def _check_checkpoints_persist(checkpoints: str, claim: Path | None, folder: Path | None) -> None:
    if "://" in checkpoints:
        return
    place = (folder or claim or Path("/")) / checkpoints
    if claim is None or not place.is_relative_to(claim):
        raise ValueError(
            f"checkpoints.folder={checkpoints!r} would be {place} inside a pod, and lost with it; use --claim for a "
            "volume and a folder on it, or --set checkpoints.folder=s3://bucket/run"
        )


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _pair(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None
