"""Copy the state of a rank from the rank with the same index in another replica: JSON and raw bytes, never pickle.

    the step, 8 bytes  ->
                       <-  the length of a table, 8 bytes; the table; the bytes of its tensors; their hash, 16 bytes

torchft's own transports unpickle what a peer sends. Here nothing received is executed, and memory is allocated only for
tensors that this rank has itself.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from fourfold.checkpoint import state
from fourfold.checkpoint.local_shards import LocalShards
from fourfold.checkpoint.optimizer import PREFIX
from fourfold.checkpoint.state import Snapshot, TrainState
from fourfold.checkpoint.storage import DTYPE_NAMES, DTYPES

MAX_TABLE_BYTES = 1 << 27
MAX_PARTS = 64  # of a packed projection
AT_ONCE_BYTES = 1 << 24
_WORD = 8  # bytes of a step and of a length


class CopyError(OSError):
    """A peer did not send what this rank needs."""


@dataclass(frozen=True)
class Copied:
    """What a peer sent, in host memory: its values, and for each name the pieces in order and what they are pieces of."""

    values: dict[str, Any]
    tensors: dict[str, list[Tensor]]
    stored: dict[str, TensorStorageMetadata]


class PeerCopy:
    """One rank's end of a copy: serves its own state while it is offered, and fetches that of a peer.

    The methods are those that `torchft.checkpointing.CheckpointTransport` names (0.2.0): ``send_checkpoint`` offers,
    ``disallow_checkpoint`` ends the offer before the weights change, ``recv_checkpoint`` fetches. What torchft hands over
    has the run's state under ``user`` and its own under ``torchft``.
    """

    def __init__(self, training: TrainState, host: str, timeout_s: float) -> None:
        self._training, self._host, self._timeout_s = training, host, timeout_s
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=64
        )
        self._changed = threading.Condition()
        self._offer: tuple[int, bytes, list[Tensor]] | None = None
        self._sending = 0
        threading.Thread(target=self._serve, name="copies for peers", daemon=True).start()

    # -- the rank that has the state ---------------------------------------------------------------------------------------------------

    def metadata(self) -> str:
        """The address of this rank, for a peer."""
        return f"{self._host}:{self._socket.getsockname()[1]}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state without a copy: it does not change before `disallow_checkpoint`."""
        (snapshot,) = state_dict["user"].values()
        table, tensors = _table(snapshot, state_dict["torchft"])
        with self._changed:
            self._offer = step, table, tensors
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        with self._changed:
            self._offer = None
            # Every transfer ends: its socket has a timeout.
            self._changed.wait_for(lambda: self._sending == 0)

    def shutdown(self, wait: bool = True) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(self._timeout_s)
            try:
                step = int.from_bytes(_exactly(connection.makefile("rb"), _WORD), "little")
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._offer is not None and self._offer[0] == step, self._timeout_s
                    )
                    if self._offer is None or self._offer[0] != step:
                        return
                    _, table, tensors = self._offer
                    self._sending += 1
            except OSError:
                return  # the peer is gone
            try:
                connection.sendall(len(table).to_bytes(_WORD, "little") + table)
                digest = xxhash.xxh3_128(table)
                for part in _parts(tensors):
                    digest.update(part)
                    connection.sendall(part)
                connection.sendall(digest.digest())
            except OSError:
                pass
            finally:
                with self._changed:
                    self._sending -= 1
                    self._changed.notify_all()

    # -- the rank that needs it -------------------------------------------------------------------------------------------------

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        host, _, port = metadata.rpartition(":")
        with socket.create_connection((host, int(port)), timeout.total_seconds()) as connection:
            connection.sendall(step.to_bytes(_WORD, "little"))
            copied, manager = fetch(connection.makefile("rb"), self._training)
        return {"user": {"default": copied}, "torchft": manager}


def _table(snapshot: Snapshot, manager: dict[str, int]) -> tuple[bytes, list[Tensor]]:
    tensors = {
        name: {
            # A rank may hold nothing of a tensor that has fewer rows than ranks; any dtype will do then.
            "dtype": DTYPE_NAMES[held.shards[0].local.dtype if held.shards else torch.float32],
            "whole": held.global_shape,
            "pieces": [list(piece.local.shape) for piece in held.shards],
        }
        for name, held in snapshot.tensors.items()
    }
    table = {"values": snapshot.values, "manager": manager, "tensors": tensors}
    return json.dumps(table).encode(), [p.local for held in snapshot.tensors.values() for p in held.shards]


def _parts(tensors: list[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        for part in _bytes_of(tensor).split(AT_ONCE_BYTES):
            yield memoryview(part.cpu().numpy())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def fetch(stream: BinaryIO, training: TrainState) -> tuple[Copied, dict[str, int]]:
    """Read what a peer sends; (the run's state, torchft's)."""
    length = int.from_bytes(_exactly(stream, _WORD), "little")
    if length > MAX_TABLE_BYTES:
        raise CopyError(f"a peer announces a table of {length} bytes; at most {MAX_TABLE_BYTES} are read")
    raw = _exactly(stream, length)
    digest = xxhash.xxh3_128(raw)
    try:
        table = json.loads(raw)
        manager = {key: int(table["manager"][key]) for key in ("step", "batches_committed")}
        copied = Copied(dict(table["values"]), {}, {})
        # The shapes of the pieces that this rank has of each of the model's tensors.
        own = {
            name.removeprefix(state.MODEL): [tuple(piece.local.shape) for piece in held.shards]
            for name, held in state.model_tensors(training.model, training.report).items()
        }
        for name, fields in table["tensors"].items():
            shapes = [tuple(int(size) for size in shape) for shape in fields["pieces"]]
            _check_shapes(name, shapes, own)
            dtype = DTYPES[fields["dtype"]]
            whole = torch.Size(int(size) for size in fields["whole"])
            copied.stored[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), whole, [])
            copied.tensors[name] = [torch.empty(shape, dtype=dtype) for shape in shapes]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CopyError(f"the table of a peer is not valid ({error!r:.300})") from error
    for tensor in chain.from_iterable(copied.tensors.values()):
        for part in _bytes_of(tensor).split(AT_ONCE_BYTES):
            view = memoryview(part.numpy())
            if stream.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise CopyError(f"a peer ended before {len(view)} bytes of a tensor")
            digest.update(view)
    if _exactly(stream, digest.digest_size) != digest.digest():
        raise CopyError("what a peer sent does not match the hash that it sent with it")
    return copied, manager


def _check_shapes(name: str, shapes: list[tuple[int, ...]], own: dict[str, list[tuple[int, ...]]]) -> None:
    """Allow only pieces as those of the model's own tensor, or scalars of the optimizer for each part of it."""
    of_model = name.startswith(state.MODEL)
    tensor = name.removeprefix(state.MODEL if of_model else PREFIX)
    mine = own[tensor if of_model else tensor.rpartition(".")[0]]
    are_scalars = not of_model and len(shapes) <= MAX_PARTS and not any(shapes)
    if shapes != mine and not are_scalars:
        raise ValueError(f"{name} has pieces of {shapes}, here {mine}")


def apply(copied: Copied, training: TrainState) -> None:
    """Set this rank's state to the copy."""
    for name, held in state.targets(training, copied.stored, copied.values).items():
        _copy_into(name, held, copied.tensors[name])
    state.resume(training, copied.values)


def _copy_into(name: str, held: LocalShards, pieces: list[Tensor]) -> None:
    if len(held.shards) != len(pieces):
        raise CopyError(f"a peer has {len(pieces)} pieces of {name}, this rank {len(held.shards)}")
    for mine, theirs in zip(held.shards, pieces, strict=True):
        if mine.local.shape != theirs.shape or mine.local.dtype != theirs.dtype:
            raise CopyError(
                f"{name} is {theirs.dtype} of {tuple(theirs.shape)} at a peer, {mine.local.dtype} of {tuple(mine.local.shape)} here"
            )
        mine.local.copy_(theirs)


def _exactly(stream: BinaryIO, count: int) -> bytes:
    got = stream.read(count)
    if len(got) != count:
        raise CopyError(f"a peer ended after {len(got)} of {count} bytes")
    return got
