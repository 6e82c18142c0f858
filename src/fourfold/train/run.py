"""A run from its config to its end, on every rank: everything outside of the loop, in order."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from fourfold.checkpoint.save import Checkpoints
from fourfold.config.schema import RunConfig
from fourfold.mesh.agreements import broadcast_object
from fourfold.mesh.grid import Grid
from fourfold.mesh.rendezvous import join_world, keep_ranks
from fourfold.train.auto_layout import resume_or_choose_layout
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Callback, Trainer
from fourfold.train.memory_fit import fit_into_memory
from fourfold.train.recovery.stop import StopRequest, handling
from fourfold.train.resilience.hang import LostRanks

RECORDED = 2000  # collectives that the flight recorder keeps
POLL_S = 1.0
_ENDED = "ended"


def train(run: RunConfig, first: Sequence[Callback] = ()) -> bool:
    """Train to the end of the schedule; False if the run was stopped before and has saved.

    ``first``: callbacks before those of the run config.
    """
    is_ours = not dist.is_initialized()
    if is_ours:
        # The report of a hang has the latest collectives; torch reads this when groups are created.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
        join_world()
    is_auto = run.grid.auto
    run = with_replica_logs(resolve_layout(run))
    used, ranks = run.grid.size, dist.get_world_size()
    idle_store = None
    if is_auto and used < ranks:
        if not is_ours:
            raise ValueError(f"no layout of {ranks} ranks can train this model; start {used}")
        rank = dist.get_rank()
        idle_store, is_used = keep_ranks(used)
        if not is_used:
            return wait_idle(idle_store, rank, used)
    with ExitStack() as stack:
        trainer = Trainer(
            run, Grid.create(run.shape, sequence_ranks=run.sequence_ranks), [*first, *callbacks_of(run)]
        )
        section = run.checkpoints
        checkpoints = stack.enter_context(Checkpoints(section.folder, keep_last=section.keep_last))
        stop = StopRequest(run.reliability.first_step_timeout_s)
        try:
            with handling(stop.request):
                trainer.train(checkpoints, stop)
        except LostRanks as lost:
            if is_ours:
                # At once: an orderly shutdown would wait for the lost ranks. A checkpoint that is being written needs all
                # ranks, so it is lost already.
                print(f"fourfold: {lost}", file=sys.stderr, flush=True)
                os._exit(1)
            raise
        stop.close()
    if idle_store is not None and dist.get_rank() == 0:
        tell_idle(idle_store, trainer.is_done)
    if is_ours:  # not after an error: with collectives in flight it could wait forever
        dist.destroy_process_group()
    return trainer.is_done


def with_replica_logs(run: RunConfig) -> RunConfig:
    """Give each replica that is a job of its own a folder for logs; they share the checkpoints."""
    if run.reliability.torchft_lighthouse is None:
        return run
    folder = run.logging.folder / f"replica-{run.reliability.replica}"
    return run.model_copy(update={"logging": run.logging.model_copy(update={"folder": folder})})


def resolve_layout(run: RunConfig) -> RunConfig:
    """The run with its layout; what the run config leaves open rank 0 chooses for all ranks."""
    if not run.grid.auto and not run.engine.is_open:
        return run
    chosen: RunConfig | str = ""
    if dist.get_rank() == 0:
        try:
            chosen = resume_or_choose_layout(run, dist.get_world_size()) if run.grid.auto else run
            target = "cuda" if torch.cuda.is_available() else "cpu"
            device_bytes = torch.cuda.get_device_properties(0).total_memory if target == "cuda" else None
            chosen = fit_into_memory(chosen, device_bytes, target)
        except Exception as error:  # whatever it is, the others wait for an answer
            chosen = str(error) if isinstance(error, ValueError | OSError) else repr(error)
    chosen = broadcast_object(chosen)
    if isinstance(chosen, str):
        raise ValueError(chosen)
    return chosen


def tell_idle(store: Any, is_done: bool) -> None:
    """Tell idle ranks that the run has ended; called on one rank of it."""
    store.set(_ENDED, "done" if is_done else "stopped")


def wait_idle(store: Any, rank: int, used: int) -> bool:
    """Wait until the run ends, on a rank that the layout does not use; True if it has done all its steps.

    Its host stays in the rendezvous, so that the next layout can use it. A request to stop ends this rank alone.
    """
    print(f"rank {rank} is idle: the layout uses {used} ranks", file=sys.stderr, flush=True)
    stop = threading.Event()
    with handling(lambda signum, frame: stop.set()):
        while not stop.wait(POLL_S):
            if store.check([_ENDED]):
                return bool(store.get(_ENDED) == b"done")
    return False
