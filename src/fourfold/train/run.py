"""A run from its file to its end, on every rank: the order of everything beside the loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from fourfold.checkpoint.save import Checkpoints
from fourfold.config.schema import RunConfig
from fourfold.mesh.grid import Grid
from fourfold.mesh.rendezvous import join_world, keep_ranks
from fourfold.train.auto_layout import settle
from fourfold.train.callbacks import callbacks_of
from fourfold.train.loop.trainer import Callback, Trainer
from fourfold.train.recovery.stop import StopRequest
from fourfold.train.resilience.hang import LostRanks
from fourfold.train.resilience.idle import tell_idle, wait_idle

RECORDED = 2000  # collectives that the flight recorder remembers


def train(run: RunConfig, first: Sequence[Callback] = ()) -> bool:
    """Train to the end of the schedule; False if it was asked to stop before, and has saved.

    ``first`` come before the callbacks that the run's file asks for.
    """
    is_ours = not dist.is_initialized()
    if is_ours:
        # What ranks have done lately is in the report of a hang; read when groups are made.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
        join_world()
    is_chosen = run.grid.auto
    run = as_replica(on_all_ranks(run))
    used, ranks = run.grid.size, dist.get_world_size()
    idle_store = None
    if is_chosen and used < ranks:
        if not is_ours:
            raise ValueError(f"no layout of {ranks} ranks can train this model; start {used}")
        rank = dist.get_rank()
        idle_store, is_used = keep_ranks(used)
        if not is_used:
            return wait_idle(idle_store, rank, used)
    with ExitStack() as ends:
        trainer = Trainer(run, Grid.create(run.shape), [*first, *callbacks_of(run)])
        checkpoints = ends.enter_context(Checkpoints(run.checkpoints.folder, keep=run.checkpoints.keep))
        stop = StopRequest(run.reliability.first_step_timeout_s)
        try:
            with stop.listening():
                trainer.train(checkpoints, stop)
        except LostRanks as lost:
            if is_ours:
                # Now: whatever would be closed in good order waits for those who do not come. A checkpoint that is
                # being written is not lost more than it is already: it needs all ranks.
                print(f"fourfold: {lost}", file=sys.stderr, flush=True)
                os._exit(1)
            raise
        stop.close()
    if idle_store is not None and dist.get_rank() == 0:
        tell_idle(idle_store, trainer.is_done)
    if is_ours:  # not after an error: with collectives in flight it could wait for ever
        dist.destroy_process_group()
    return trainer.is_done


def as_replica(run: RunConfig) -> RunConfig:
    """Replicas that are jobs of their own each have their logs; they share the checkpoints."""
    if run.reliability.lighthouse is None:
        return run
    folder = run.logging.folder / f"replica-{run.reliability.replica}"
    return run.model_copy(update={"logging": run.logging.model_copy(update={"folder": folder})})


def on_all_ranks(run: RunConfig) -> RunConfig:
    """The run with its grid settled; where the planner chooses it, one rank asks for all."""
    if not run.grid.auto:
        return run
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = settle(run, dist.get_world_size())
        except Exception as refusal:  # whatever it is, the others wait for an answer
            answer[1] = str(refusal) if isinstance(refusal, ValueError | OSError) else repr(refusal)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise ValueError(answer[1])
    chosen: RunConfig = answer[0]
    return chosen
