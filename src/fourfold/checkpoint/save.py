"""Saving while training goes on, and loading what is whole.

A save copies what it needs and returns; a thread writes, on a process group of its own, because a collective of two
threads on one group would wait for each other for ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fourfold.checkpoint import retention, state
from fourfold.checkpoint.commit import step_name
from fourfold.checkpoint.folder import Folder, open_folder
from fourfold.checkpoint.index import tensors
from fourfold.checkpoint.manifest import find_damage
from fourfold.checkpoint.pieces import LoadPlanner, SavePlanner
from fourfold.checkpoint.state import Snapshot, TrainState
from fourfold.checkpoint.storage import Reader, Writer
from fourfold.mesh import agreements

T = TypeVar("T")
logger = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint was not saved; raised on all ranks, by the call that follows the save."""


class Checkpoints:
    """The checkpoints of a run, in a folder or under an fsspec URL. All ranks make it, and call it alike.

    ``keep`` of the newest stay; older ones are removed once the newest has been read back and is whole.
    ``timeout_s`` bounds how long ranks wait for each other.

    Example:
        >>> with Checkpoints("runs/one", keep=3) as checkpoints:  # doctest: +SKIP
        ...     checkpoints.load(training)  # goes on from the newest valid one, if there is one
        ...     checkpoints.save(training)  # returns once it is copied
    """

    def __init__(
        self, where: str | os.PathLike[str], *, keep: int | None = None, timeout_s: float = 1800.0
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(
                f"keep={keep} would remove the checkpoint just saved; use at least 1, or None for all"
            )
        self.root: Folder = open_folder(where)
        self.keep = keep
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._thread: threading.Thread | None = None
        self.saving: int | None = None  # the step of a save that nobody has waited for yet
        self._error: SaveError | None = None

    def save(self, training: TrainState) -> None:
        """Begin to save, as ``step-N`` with N = ``training.step``; training may go on when this returns.

        Waits for the save before, and raises if that one failed.
        """
        self.wait()
        snapshot = state.capture(training).staged()
        self.saving = training.step
        self._thread = threading.Thread(
            target=self._save, args=(training.step, snapshot), name=f"save {step_name(training.step)}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the save that was begun is done; raises on all ranks if it failed on any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self.saving = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def load(self, training: TrainState, step: int | None = None, *, before: int | None = None) -> int | None:
        """Set the run to a checkpoint, by default the newest valid one; its step, or None if there is none at all.

        With ``before``, a step, the newest valid one from before it; later ones are set aside.

        Every file is hashed first, each by one rank. Checkpoints that are damaged and newer are set aside. If
        there are checkpoints and none is valid, that is an error: nobody wants to begin anew without knowing.
        """
        self.wait()
        if before is not None:
            self._undo_from(before)
        step = self._newest() if step is None else self._checked(step)
        if step is None:
            return None
        reader = Reader(self.root, step)
        values = state.read_values(reader.folder)
        targets = state.targets(training, tensors(reader.metadata), values)
        try:
            dcp_load(
                cast(Any, targets), storage_reader=reader, planner=LoadPlanner(), process_group=self._group
            )
        except CheckpointException as error:
            raise ValueError(f"{reader.folder} cannot be loaded:\n{_words(error)}") from error
        state.resume(training, values)
        return step

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, oldest first; the same on all ranks."""
        self.wait()
        return self._from_first(lambda: retention.steps(self.root))

    def close(self) -> None:
        """Wait for the last save, and end the process group."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._thread is not None:
            # What went wrong first is what is to be seen; a save under way may still end well.
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _save(self, step: int, snapshot: Snapshot) -> None:
        failures: list[str] = []
        outcome = "was not saved"
        try:
            writer = Writer(self.root, step, snapshot.values)
            dcp_save(
                cast(Any, snapshot.tensors),
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=self._group,
            )
            outcome = "was saved, but older checkpoints were not removed"
            failures = self._retain(step)
        except BaseException as error:  # CheckpointException, of all ranks, is no Exception
            failures = [
                _words(error) if isinstance(error, CheckpointException) else f"rank {self._rank}: {error!r}"
            ]
        if failures:
            self._error = SaveError(f"{self.root}/{step_name(step)} {outcome}:\n" + "\n".join(failures))

    def _retain(self, newest: int) -> list[str]:
        """Remove what is older than the ``keep`` newest, if the newest is whole when it is read back."""
        keep = self.keep
        if keep is None:
            return []
        # What was just saved stays, also when a run that was set back saves before what it had saved.
        old = self._from_first(lambda: retention.outdated(retention.steps(self.root), keep, newest))
        if not old:
            return []
        damage = self._damage(newest)
        if damage:
            return [f"it is damaged when read back, so {', '.join(map(step_name, old))} stay", *damage]
        self._from_first(lambda: retention.remove(self.root, old))
        return []

    # -- agreement of all ranks ---------------------------------------------------------------------------------------

    def _newest(self) -> int | None:
        committed = self.steps()
        step, damaged = retention.newest_valid(committed, self._damage)
        if committed and step is None:
            lines = "\n".join(line for damage in damaged.values() for line in damage[:3])
            raise ValueError(
                f"none of the {len(committed)} checkpoints in {self.root} is valid; give another folder to begin anew\n{lines}"
            )
        for bad, damage in damaged.items():
            name = self._from_first(lambda bad=bad: retention.set_aside(self.root, bad, "damaged"))  # type: ignore[misc]
            logger.warning("%s is damaged and now called %s: %s", step_name(bad), name, "; ".join(damage[:3]))
        return step

    def _undo_from(self, first: int) -> None:
        committed = self._from_first(lambda: retention.steps(self.root))
        for step in (s for s in committed if s >= first):
            name = self._from_first(lambda step=step: retention.set_aside(self.root, step, "undone"))  # type: ignore[misc]
            logger.warning("%s is of steps that are undone, and now called %s", step_name(step), name)

    def _checked(self, step: int) -> int:
        committed = self.steps()
        if step not in committed:
            raise ValueError(
                f"there is no {step_name(step)} in {self.root}; it has {list(map(step_name, committed))}"
            )
        if damage := self._damage(step):
            raise ValueError("\n".join([f"{self.root}/{step_name(step)} is damaged:", *damage]))
        return step

    def _damage(self, step: int) -> list[str]:
        folder = self.root.child(step_name(step))
        try:
            mine = find_damage(folder, step, part=self._rank, parts=self._ranks)
        except OSError as error:
            mine = [f"{folder}: cannot be read on rank {self._rank} ({error})"]
        return sorted({line for lines in agreements.gather_objects(mine, self._group) for line in lines})

    def _from_first(self, work: Callable[[], T]) -> T:
        """What rank 0 computes, on all ranks; if it fails, it fails on all."""
        answer: list[Any] = [None, None]
        if self._rank == 0:
            try:
                answer[0] = work()
            except Exception as error:
                answer[1] = f"rank 0: {error!r}"
        value, failure = agreements.broadcast_object(answer, self._group)
        if failure is not None:
            raise OSError(failure)
        return cast(T, value)


def _words(error: CheckpointException) -> str:
    """The errors of all ranks, without their traces."""
    return "\n".join(
        f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())
    )
