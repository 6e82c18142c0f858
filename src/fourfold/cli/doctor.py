"""`fourfold doctor`: what this machine has, what a run would use here, and what may be in its way."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# What an extra is for, and a module of it.
EXTRAS = {
    "plots": ("HTML reports", "plotly"),
    "data": ("Parquet, Arrow and hub data sets", "datasets"),
    "s3": ("checkpoints on S3", "s3fs"),
    "torchft": ("replicas that come and go", "torchft"),
    "wandb": ("Weights & Biases", "wandb"),
    "mlflow": ("MLflow", "mlflow"),
    "prometheus": ("Prometheus", "prometheus_client"),
}
LEAST_SHARED_MEMORY_GIB = 1.0  # NCCL's buffers between the GPUs of a node
LEAST_OPEN_FILES = 4096  # each rank has a connection to many others


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show devices, versions and network, what a run would use here, and what to fix",
        description="Show the devices, versions and network of this machine, what a run would use here and why, and what to "
        "fix. It does not start ranks: `torchrun --nproc-per-node 8 -m fourfold.selftest` does, and checks that they are exact.",
        epilog="Example: fourfold doctor",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    problems: list[str] = []
    for title, lines in (
        ("versions", _versions(torch)),
        ("devices", _devices(torch, problems)),
        ("network", _network()),
        ("limits", _limits(torch, problems)),
        ("Hugging Face", _hub()),
        ("extras", _extras()),
        ("a run here", _choices(torch)),
    ):
        for i, line in enumerate(lines):
            print(f"{title if i == 0 else '':13} {line}")
    print()
    for problem in problems:
        print(f"fix: {problem}")
    print(f"{len(problems) or 'no'} problem{'s' if len(problems) != 1 else ''} found")
    return 0


def _versions(torch: Any) -> Iterator[str]:
    yield f"fourfold {version('fourfold')}, Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}, transformers {version('transformers')}, CUDA {torch.version.cuda or 'not built in'}"
    if torch.cuda.is_available():
        yield f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _devices(torch: Any, problems: list[str]) -> Iterator[str]:
    count = torch.cuda.device_count()
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        yield f"{index}: {device.name}, {device.total_memory / 2**30:.0f} GiB"
    if count and not torch.cuda.is_bf16_supported():
        problems.append(
            "these GPUs do not compute in bf16, the default precision; set engine.precision = 'fp32'"
        )
    if not count:
        cores = len(os.sched_getaffinity(0))
        yield f"no GPU; {cores} CPU cores, {_memory_gib():.0f} GiB"
        if torch.version.cuda:
            problems.append("torch has CUDA built in and finds no GPU; check nvidia-smi and the driver")
        elif Path("/dev/nvidia0").exists():
            problems.append(
                "this machine has an NVIDIA GPU and a CPU build of torch; install the build for your CUDA version"
            )


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _network() -> Iterator[str]:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    yield f"{socket.gethostname()}: {', '.join(names) or 'loopback alone'}"
    cards = Path("/sys/class/infiniband")
    found = sorted(path.name for path in cards.iterdir()) if cards.exists() else []
    yield f"InfiniBand and RoCE: {', '.join(found) or 'none, so NCCL uses TCP between nodes, unless a plugin for the network is loaded (Slingshot, EFA)'}"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"):
        if name in os.environ:
            yield f"{name}={os.environ[name]}"
    if "SLURM_JOB_ID" in os.environ:
        yield f"Slurm job {os.environ['SLURM_JOB_ID']} on {os.environ.get('SLURM_JOB_NUM_NODES', '?')} nodes"
    elif shutil.which("sbatch"):
        yield "Slurm: sbatch is here, so `fourfold launch slurm` can submit"


def _limits(torch: Any, problems: list[str]) -> Iterator[str]:
    shared_gib = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").exists() else 0.0
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # ranks raise their limit to the hard one
    yield f"/dev/shm {shared_gib:.1f} GiB, {files} open files"
    if torch.cuda.device_count() > 1 and shared_gib < LEAST_SHARED_MEMORY_GIB:
        problems.append(
            f"/dev/shm has {shared_gib:.2f} GiB, and NCCL needs {LEAST_SHARED_MEMORY_GIB:.0f} or more; in a container use --shm-size"
        )
    if files < LEAST_OPEN_FILES:
        problems.append(
            f"a process may open {files} files, and ranks of a large grid need more; raise the hard limit, ulimit -Hn"
        )


def _hub() -> Iterator[str]:
    from huggingface_hub import constants, get_token

    token = "a token is set" if get_token() else "no token, which gated models need: set HF_TOKEN"
    offline = ", offline" if constants.HF_HUB_OFFLINE else ""
    yield f"{token}{offline}; cache {constants.HF_HUB_CACHE}"


def _extras() -> Iterator[str]:
    have = [name for name, (_, module) in EXTRAS.items() if find_spec(module)]
    yield f"installed: {', '.join(have) or 'none'}"
    for name, (what, _) in EXTRAS.items():
        if name not in have:
            yield f"not installed: {name} ({what}): pip install 'fourfold[{name}]'"


def _choices(torch: Any) -> Iterator[str]:
    if count := torch.cuda.device_count():
        yield f"{count} ranks, one on each GPU, unless the run config sets a grid"
        yield "collectives by NCCL; weights by FSDP2, whose collectives overlap on CUDA streams"
    else:
        yield "1 rank, unless the run config sets a grid or --ranks is given"
        yield "collectives by Gloo; weights streamed, which overlaps on a CPU (FSDP2's collectives would block)"
    yield "precision bf16 with fp32 master weights, unless the run config says fp32"
