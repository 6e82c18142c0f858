"""Replicas that come and go: each is a job of its own, and torchft says which of them are there.

    for each step   a quorum: who is there; who comes new copies the run from a peer
                    the global batch, dealt among them
                    forward and backward
                    labels, loss and gradients added up over them
                    all arrived: the step counts; a replica was lost on the way: the same samples once more, without it

The samples of a step are the same whoever is there, and so are its numbers, up to the order of sums. Inside a replica
nothing changes: its z, y and x ranks are there together, or not at all. See docs/decisions/0020-replicas-come-and-go.md.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from fourfold.checkpoint import state
from fourfold.checkpoint.state import Snapshot
from fourfold.data.loader import Batch
from fourfold.data.mixture import check_identity
from fourfold.train.recovery import peer_copy

if TYPE_CHECKING:
    from fourfold.train.loop.trainer import Trainer

BUCKET_BYTES = 1 << 25
# Who answers to a quorum is there to connect to; one that dies between is waited for so long.
CONNECT_S = 2.0
IN_FLIGHT = 2  # buckets; with more, memory for a second gradient would be needed


class TorchFTManager:
    """The replicas of one run, as a rank of one of them sees it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._torchft = _torchft()
        self._manager: Any = None
        self._group: Any = None
        self._store: TCPStore | None = None
        self._timeout = timedelta(seconds=trainer.run.reliability.timeout_s)
        self._on_gloo = trainer.grid.device.type == "cpu"
        self._connect_timeout = timedelta(seconds=CONNECT_S) if self._on_gloo else self._timeout
        # How many replicas there are in this step, and the how manyth of them this is.
        self.size = self.place = 0

    @property
    def leads(self) -> bool:
        """Is this the replica that saves?"""
        return self.place == 0

    # -- the order of a step --------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait for the others, as long as they are alive; copy the run from one of them if it is ahead."""
        trainer = self._trainer
        if self._manager is None:
            self._join()
        before = self.size, self.place
        self._group.set_timeout(self._connect_timeout)
        self._manager.start_quorum()
        if self._failure():
            # They have not found each other. The step is gone through, and does not count; then once more, with more time.
            self._connect_timeout = min(2 * self._connect_timeout, self._timeout)
        else:
            self._set_timeout()
        self.size, self.place = self._manager.num_participants(), self._manager.participating_rank()
        if (self.size, self.place) != before:
            self._say(
                f"{self.size} of {trainer.run.grid.data} replicas are there; this one takes sequences "
                "{0.start} to {0.stop} of each batch".format(self._rows(whole=True))
            )

    def batches(self) -> Iterator[Batch]:
        """This rank's rows of the next step, after each `meet`; again of the same, as long as it does not count."""
        trainer = self._trainer
        reader: Iterator[Batch] = iter(())
        prepared: tuple[slice, int] | None = None
        while True:
            rows, sample = self._rows(), int(trainer.training.data["samples"])
            if (rows, sample) != prepared:
                reader = trainer.loader.batches(sample, rows)
            batch = next(reader)
            prepared = rows, batch.next_sample
            yield batch

    def sum(self, tensor: Tensor) -> Tensor:
        """Over the replicas, in place. If one is lost it is any number; the step does not count then."""
        if self.size > 1:
            self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
            self._failure()
        return tensor

    def add_up(self, loss: Tensor) -> bool:
        """Loss and gradients over the replicas, in place; False if this step does not count.

        All ranks of a replica come here, also those that know of a failure: the others of the replica wait for them.
        """
        if self.size > 1:
            self._sum_gradients()
            self.sum(loss)
        failure = self._failure()
        # Longer than a collective may take: one rank may know of a failure when another still waits in one.
        if self._manager.should_commit(timeout=3 * self._timeout):
            return True
        self._say(f"a replica was lost on the way; the same samples once more{failure}")
        return False

    def close(self) -> None:
        """At the end of the run: no rank of this replica waits for an answer any more."""
        if self._manager is not None:
            dist.barrier()
            self._manager.shutdown()
            self._manager = None

    def _failure(self) -> str:
        """In words, if there is one. Then the connections to the other replicas are cut: who waits for this one learns it."""
        failed = self._manager.errored()
        if failed is None:
            return ""
        self._group.abort()
        words = str(getattr(failed, "original_exception", failed)).strip().splitlines() or [repr(failed)]
        return f" ({words[-1][:200]})"

    def _set_timeout(self) -> None:
        """Connections are made within `CONNECT_S`, but a collective waits for a replica that is slow, or copies the run.

        torchft's NCCL group has one time-out for both.
        """
        if self._on_gloo:
            self._connect_timeout = timedelta(seconds=CONNECT_S)
            # No public call sets the time-out of a group that exists (seen in torch 2.13.0).
            self._group.parent._get_backend(torch.device("cpu"))._set_default_timeout(self._timeout)

    # -- parts of it ----------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> int:
        return self._trainer.run.reliability.replica

    def _rows(self, *, whole: bool = False) -> slice:
        """Of the global batch, those of this rank; ``whole``: of this replica."""
        grid, sequences = self._trainer.grid, self._trainer.run.sequences
        if self.size > sequences // grid.z:
            raise ValueError(
                f"{self.size} replicas are there, and a batch of {sequences} sequences gives each of z={grid.z} ranks of only "
                f"{sequences // grid.z} of them a row; start fewer, or use a larger batch.tokens"
            )
        share = dealt(sequences // grid.z, self.size, self.place)
        if whole:
            return slice(share.start * grid.z, share.stop * grid.z)
        rows = share.stop - share.start
        first = share.start * grid.z + grid.coordinate("z") * rows
        return slice(first, first + rows)

    def _sum_gradients(self) -> None:
        in_flight: list[tuple[Any, Tensor, list[Tensor]]] = []

        def land() -> None:
            work, flat, parts = in_flight.pop(0)
            work.wait()
            if flat is not parts[0]:
                torch._foreach_copy_(parts, [t.view_as(p) for t, p in _cut(flat, parts)])

        for bucket in _buckets(self._trainer.model):
            if len(in_flight) == IN_FLIGHT:
                land()
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if alone else torch.cat([part.reshape(-1) for part in bucket])
            in_flight.append((self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM), flat, bucket))
        while in_flight:
            land()

    def _join(self) -> None:
        """Last of all that comes before the first step: from here on the others count on this replica."""
        trainer, torchft = self._trainer, self._torchft
        section, training = trainer.run.reliability, trainer.training
        first_timeout = timedelta(seconds=max(section.timeout_s, section.first_step_timeout_s))
        host = socket.gethostname()
        # A store of this attempt alone: that of a launcher may have addresses of ranks that are dead.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if trainer.is_first else None
        met_at: list[Any] = [(host, self._store.port) if self._store is not None else None]
        dist.broadcast_object_list(met_at, src=0)
        store_host, store_port = met_at[0]
        kind = torchft.ProcessGroupGloo if self._on_gloo else torchft.ProcessGroupNCCL
        self._group = kind(timeout=self._timeout)
        try:
            self._manager = torchft.Manager(
                pg=self._group,
                state_dict=self._state,
                load_state_dict=self._load,
                min_replica_size=1,
                # Before forward, not beside it: who is there decides who takes which rows.
                use_async_quorum=False,
                # Weights are drawn alike from the seed, or read from the same files.
                init_sync=False,
                timeout=self._timeout,
                quorum_timeout=first_timeout,
                connect_timeout=self._timeout,
                # A second apart: a lighthouse that is started again is found.
                quorum_retries=int(first_timeout.total_seconds()),
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                store_addr=store_host,
                store_port=store_port,
                lighthouse_addr=section.lighthouse,
                replica_id=str(self._name),
                hostname=host,
                checkpoint_transport=peer_copy.PeerCopy(training, host, section.timeout_s),
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"no lighthouse answers at reliability.lighthouse={section.lighthouse}; start torchft_lighthouse there, as "
                f"docs/reliability.md says ({error})"
            ) from None
        self._manager.load_state_dict({"step": training.step, "batches_committed": 0})

    def _state(self) -> Snapshot:
        for callback in self._trainer.callbacks:
            callback.on_save(self._trainer)
        return state.capture(self._trainer.training)

    def _load(self, copied: peer_copy.Copied) -> None:
        trainer = self._trainer
        training, shape = trainer.training, list(trainer.grid.shape)
        if copied.values["grid"] != shape:
            raise ValueError(
                f"a replica has the grid {copied.values['grid']}, this one {shape}; start all from the same file"
            )
        identity = {key: value for key, value in training.data.items() if key != "samples"}
        check_identity({k: v for k, v in copied.values["data"].items() if k != "samples"}, identity)
        before = trainer.step
        peer_copy.apply(copied, training)
        for callback in trainer.callbacks:
            callback.on_rollback(trainer)
        self._say(f"copied from a replica; this one was at step {before}")

    def _say(self, words: str) -> None:
        if self._trainer.is_first:
            print(
                f"replica {self._name}, step {self._trainer.step + 1}: {words}", file=sys.stderr, flush=True
            )


def dealt(rows: int, parts: int, part: int) -> slice:
    """As evenly as it goes, in order.

    Example:
        >>> [dealt(8, 3, part) for part in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
    """
    return slice(rows * part // parts, rows * (part + 1) // parts)


def _buckets(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """The gradients that this rank holds, many small ones together."""
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


def _cut(flat: Tensor, parts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat.split([part.numel() for part in parts]), parts, strict=True))


def _torchft() -> Any:
    # A line for every quorum of every rank otherwise; read when it is imported.
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        import torchft
    except ImportError as error:
        raise ValueError(
            f"reliability.lighthouse needs torchft, which is not here ({error}); pip install 'fourfold[torchft]', or leave the "
            "lighthouse out: then a lost rank ends the run, and it is started again from a checkpoint"
        ) from None
    # It logs the trace of every replica that is lost; what there is to know of it is said here.
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    return torchft
