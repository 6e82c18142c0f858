"""Replicas that can be lost and join again during a run: each is a job of its own, and torchft says which are running.

    for each step   quorum: which replicas take part; a new one copies the state of the run from a peer
                    the global batch, split among them
                    forward and backward
                    label counts, loss and gradients summed over them
                    commit; if a replica was lost on the way, the step is repeated without it, on the same samples

The samples of a step do not depend on which replicas take part, so its results do not either, up to the order of sums.
Inside a replica nothing changes: its z, y and x ranks run together, or not at all. See
docs/decisions/0020-replicas-come-and-go.md.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from fourfold.checkpoint import state
from fourfold.checkpoint.save import Checkpoints
from fourfold.checkpoint.state import Snapshot, TrainState
from fourfold.config.schema import RunConfig
from fourfold.data.loader import Batch, Loader
from fourfold.data.mixture import check_identity
from fourfold.mesh import agreements
from fourfold.mesh.grid import Grid
from fourfold.train.recovery import peer_copy

BUCKET_BYTES = 1 << 25
# A replica that answered to the quorum can be connected to; wait this long for one that dies in between.
CONNECT_S = 2.0
IN_FLIGHT = 2  # buckets; more would need memory for a second copy of the gradients


class TorchFTManager:
    """The replicas of one run, as seen by a rank of one of them. `SingleReplica` has the same interface.

    ``loop`` is the `Trainer`, whose `timed`, `warn`, `before_save` and `after_rollback` are called.
    """

    def __init__(self, run: RunConfig, grid: Grid, loop: Any) -> None:
        self._run, self._grid, self._loop = run, grid, loop
        self._torchft = _import_torchft()
        self._manager: Any = None
        self._group: Any = None
        self._store: TCPStore | None = None
        self._training: TrainState
        self._timeout = timedelta(seconds=run.reliability.timeout_s)
        self._on_gloo = grid.device.type == "cpu"
        self._connect_timeout = timedelta(seconds=CONNECT_S) if self._on_gloo else self._timeout
        self.planned = run.grid.data
        self.size = self.index = 0  # of the replicas that take part in this step

    # -- in the order of a step ------------------------------------------------------------------------------------------

    def batches(self, training: TrainState, loader: Loader) -> Iterator[Batch]:
        """The rows of the next step, after each `start_step`; the same samples again if the step is repeated."""
        self._training = training
        return self._batches(loader)

    def _batches(self, loader: Loader) -> Iterator[Batch]:
        reader: Iterator[Batch] = iter(())
        prepared: tuple[slice, int] | None = None
        sequences, z, z_index = self._run.sequences, self._grid.z, self._grid.coordinate("z")
        while True:
            rows = rank_rows(sequences, z, z_index, self.size, self.index)
            sample = int(self._training.data["samples"])
            if (rows, sample) != prepared:
                reader = loader.batches(sample, rows)
            batch = next(reader)
            prepared = rows, batch.next_sample
            yield batch

    def start_step(self) -> None:
        """Wait for the others, as long as they are alive; copy the state of the run from one of them if it is ahead."""
        with self._loop.timed("quorum"):
            if self._manager is None:
                self._join()
            before = self.size, self.index
            self._group.set_timeout(self._connect_timeout)
            self._manager.start_quorum()
            if self._failure():
                # They could not connect. The step is computed but not committed; then it is repeated, with more time.
                self._connect_timeout = min(2 * self._connect_timeout, self._timeout)
            else:
                self._set_timeout()
            self.size, self.index = self._manager.num_participants(), self._manager.participating_rank()
            if (self.size, self.index) != before:
                rows = replica_rows(self._run.sequences, self._grid.z, self.size, self.index)
                self._log(
                    f"{self.size} of {self.planned} replicas take part; this one has sequences {rows.start} to {rows.stop} of "
                    "each batch"
                )

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the replicas, in place. The result is arbitrary if one is lost; the step is repeated then."""
        if self.size > 1:
            self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
            self._failure()
        return tensor

    def sum_gradients(self, loss: Tensor) -> bool:
        """Sum loss and gradients over the replicas, in place; False if the step has to be repeated.

        All ranks of a replica call this, also those that know of a failure: the other ranks wait for them.
        """
        if self.size > 1:
            self._sum_gradients()
            self.sum(loss)
        failure = self._failure()
        # Longer than a collective may take: one rank may know of a failure while another still waits in one.
        if self._manager.should_commit(timeout=3 * self._timeout):
            return True
        self._log(f"a replica was lost during the step, which is repeated on the same samples{failure}")
        return False

    def metrics(self) -> dict[str, float]:
        return {"replicas": float(self.size)}

    def saves(self, step: int, checkpoints: Checkpoints) -> bool:
        """The first replica saves for all; another one, which is lost by now, may have saved this step before."""
        return self.index == 0 and step not in checkpoints.steps()

    def close(self) -> None:
        """End the run once no rank of this replica waits for an answer any more."""
        if self._manager is not None:
            agreements.barrier()
            self._manager.shutdown()
            self._manager = None

    def _failure(self) -> str:
        """Describe the failure, if there is one, and abort the connections, so that replicas that wait for this one notice."""
        failed = self._manager.errored()
        if failed is None:
            return ""
        self._group.abort()
        lines = str(getattr(failed, "original_exception", failed)).strip().splitlines() or [repr(failed)]
        return f" ({lines[-1][:200]})"

    def _set_timeout(self) -> None:
        """Allow `CONNECT_S` to connect, but the full timeout in a collective: a replica may be slow, or copy the state.

        torchft's NCCL group has one timeout for both.
        """
        if self._on_gloo:
            self._connect_timeout = timedelta(seconds=CONNECT_S)
            # No public call sets the timeout of a group that exists (seen in torch 2.13.0).
            self._group.parent._get_backend(torch.device("cpu"))._set_default_timeout(self._timeout)

    # -- parts of a step -------------------------------------------------------------------------------------------------

    def _sum_gradients(self) -> None:
        in_flight: list[tuple[Any, Tensor, list[Tensor]]] = []

        def finish_oldest() -> None:
            work, flat, parts = in_flight.pop(0)
            work.wait()
            if flat is not parts[0]:
                sums = flat.split([part.numel() for part in parts])
                torch._foreach_copy_(parts, [t.view_as(p) for t, p in zip(sums, parts, strict=True)])

        for bucket in _buckets(self._training.model):
            if len(in_flight) == IN_FLIGHT:
                finish_oldest()
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if alone else torch.cat([part.reshape(-1) for part in bucket])
            in_flight.append((self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM), flat, bucket))
        while in_flight:
            finish_oldest()

    def _join(self) -> None:
        """Join the other replicas, right before the first step: from here on they wait for this one."""
        torchft, section, training = self._torchft, self._run.reliability, self._training
        first_timeout = timedelta(seconds=max(section.timeout_s, section.first_step_timeout_s))
        host = socket.gethostname()
        # A new store for each attempt: the launcher's may have addresses of ranks that are dead.
        is_first = dist.get_rank() == 0
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_first else None
        address = (host, self._store.port) if self._store is not None else ("", 0)
        store_host, store_port = agreements.broadcast_object(address)
        kind = torchft.ProcessGroupGloo if self._on_gloo else torchft.ProcessGroupNCCL
        self._group = kind(timeout=self._timeout)
        try:
            self._manager = torchft.Manager(
                pg=self._group,
                state_dict=self._state,
                load_state_dict=self._load,
                min_replica_size=1,
                # Before forward, not during it: the quorum decides which rows each replica takes.
                use_async_quorum=False,
                # All replicas have the same weights, initialised from the same seed or read from the same files.
                init_sync=False,
                timeout=self._timeout,
                quorum_timeout=first_timeout,
                connect_timeout=self._timeout,
                # One per second, to find a lighthouse that was restarted.
                quorum_retries=int(first_timeout.total_seconds()),
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                store_addr=store_host,
                store_port=store_port,
                lighthouse_addr=section.torchft_lighthouse,
                replica_id=str(section.replica),
                hostname=host,
                checkpoint_transport=peer_copy.PeerCopy(training, host, section.timeout_s),
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"no lighthouse answers at reliability.torchft_lighthouse={section.torchft_lighthouse}; start torchft_lighthouse there, as "
                f"docs/reliability.md says ({error})"
            ) from None
        self._manager.load_state_dict({"step": training.step, "batches_committed": 0})

    def _state(self) -> Snapshot:
        self._loop.before_save()
        return state.capture(self._training)

    def _load(self, copied: peer_copy.Copied) -> None:
        training, shape = self._training, list(self._grid.shape)
        if copied.values["grid"] != shape:
            raise ValueError(
                f"a replica has the grid {copied.values['grid']}, this one {shape}; start all from the same run config"
            )
        identity = {key: value for key, value in training.data.items() if key != "samples"}
        check_identity({k: v for k, v in copied.values["data"].items() if k != "samples"}, identity)
        before = training.step
        peer_copy.apply(copied, training)
        self._loop.after_rollback()
        self._log(f"state copied from another replica; this one was at step {before}")

    def _log(self, message: str) -> None:
        replica, step = self._run.reliability.replica, self._training.step + 1
        self._loop.warn(f"replica {replica}, step {step}: {message}")


def replica_rows(sequences: int, z: int, replicas: int, index: int) -> slice:
    """The rows of a global batch that a replica takes: contiguous, a multiple of z, split as evenly as possible.

    Example:
        >>> [replica_rows(8, 1, 3, index) for index in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
    """
    per_z_rank = sequences // z
    if replicas > per_z_rank:
        raise ValueError(
            f"{replicas} replicas take part, but a batch of {sequences} sequences has a row for each of z={z} ranks of only "
            f"{per_z_rank} of them; start fewer, or use a larger batch.tokens"
        )
    return slice(per_z_rank * index // replicas * z, per_z_rank * (index + 1) // replicas * z)


def rank_rows(sequences: int, z: int, z_index: int, replicas: int, index: int) -> slice:
    """The rows of a global batch that a rank takes."""
    share = replica_rows(sequences, z, replicas, index)
    rows = (share.stop - share.start) // z
    return slice(share.start + z_index * rows, share.start + (z_index + 1) * rows)


def _buckets(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """The gradients that this rank holds, small ones grouped."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        more = local.numel() * local.element_size()
        if bucket and (size + more > BUCKET_BYTES or local.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        if more:
            bucket.append(local)
            size += more
    if bucket:
        yield bucket


def _import_torchft() -> Any:
    # Without it torchft logs a line for every quorum of every rank; it reads this when it is imported.
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        import torchft
    except ImportError as error:
        raise ValueError(
            f"reliability.torchft_lighthouse needs torchft, which is not installed ({error}); pip install 'fourfold[torchft]', or leave "
            "lighthouse out: then a lost rank ends the run, which is restarted from a checkpoint"
        ) from None
    # It logs a traceback for every replica that is lost; this module logs one line instead.
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    return torchft
