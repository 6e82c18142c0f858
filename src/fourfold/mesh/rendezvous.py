"""Rendezvous: join the ranks that torchrun or Slurm's srun started."""

from __future__ import annotations

import os
import re
import resource
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, rendezvous  # type: ignore[attr-defined]

# There is no public call that returns the store of the default group (seen in torch 2.13.0).
from torch.distributed.distributed_c10d import _get_default_store

from fourfold.mesh.agreements import barrier
from fourfold.processes import is_rank

FRESH_STORE = (
    "FOURFOLD_FRESH_STORE"  # set by Fourfold's launch agent: the store belongs to this attempt alone
)


def local_device(device_type: str | None) -> torch.device:
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    # Slurm may show each task only its own GPU, which then has number 0.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_world(device_type: str | None = None, timeout_s: float = 600.0) -> None:
    """Start ``torch.distributed`` under torchrun or srun; a process that neither of them started is a world of one rank."""
    device = local_device(device_type)
    if is_rank():
        start_process_group(device, timeout_s)
        return
    _init_process_group(device, store=HashStore(), rank=0, world_size=1)


def keep_ranks(ranks: int, timeout_s: float = 600.0) -> tuple[PrefixStore, bool]:
    """Continue with the first ``ranks`` ranks as the world.

    Returns a store that all ranks of the old world share, and whether this rank belongs to the new one.
    """
    store, rank = PrefixStore(f"first-{ranks}", _get_default_store()), dist.get_rank()
    device = local_device(None)
    barrier()
    dist.destroy_process_group()
    if rank >= ranks:
        return store, False
    os.environ["WORLD_SIZE"] = str(ranks)
    timeout, world = timedelta(seconds=timeout_s), PrefixStore("world", store)
    _init_process_group(device, timeout=timeout, store=world, rank=rank, world_size=ranks)
    return store, True


def _init_process_group(device: torch.device, **options: Any) -> None:
    # The store's host has a socket for each rank, and rank 0 gathers from all when a checkpoint is saved.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    is_cuda = device.type == "cuda"
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None, **options)


def start_process_group(device: torch.device, timeout_s: float) -> None:
    """Initialize the default process group from the environment of torchrun or srun."""
    if "RANK" not in os.environ:
        if "SLURM_PROCID" not in os.environ:
            raise ValueError(
                "there is no process group to join: neither RANK (torchrun) nor SLURM_PROCID (srun) is set; "
                "start with `torchrun --nproc-per-node N script.py` or `srun python script.py`"
            )
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = _slurm("SLURM_NTASKS")
        os.environ["LOCAL_RANK"] = _slurm("SLURM_LOCALID")
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = first_host(_slurm("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
        if "MASTER_PORT" not in os.environ:
            # Every rank derives the same port from the job id; two jobs on a node rarely get the same one.
            os.environ["MASTER_PORT"] = str(20000 + int(_slurm("SLURM_JOB_ID")) % 20000)
    timeout = timedelta(seconds=timeout_s)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or FRESH_STORE in os.environ:
        _init_process_group(device, timeout=timeout)
        return
    # torchrun keeps its store across restarts (2.13.0), including the addresses of ranks that died.
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"attempt-{attempt}", store)
    _init_process_group(device, timeout=timeout, store=store, rank=rank, world_size=ranks)


def _slurm(*names: str) -> str:
    found = next((os.environ[name] for name in names if name in os.environ), None)
    if found is None:
        raise ValueError(
            f"SLURM_PROCID={os.environ['SLURM_PROCID']} is set, but {' or '.join(names)} is not; start with "
            "`srun python script.py`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    return found


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    Example:
        >>> first_host("nid[001024-001027,001100],login1")
        'nid001024'
    """
    first = re.match(r"((?:[^\[\],]|\[[^\[\]]+\])+)(?:,|$)", nodelist)
    if first is None:
        raise ValueError(
            f"cannot read the first host of Slurm's node list {nodelist!r}; set MASTER_ADDR to its name"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[1])
