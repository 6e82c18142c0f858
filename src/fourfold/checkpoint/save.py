"""Asynchronous saves, and loading of the newest valid checkpoint.

A save copies the state and returns; a thread writes it, on its own process group, because collectives of two threads on
one group would deadlock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fourfold.checkpoint import commit, state
from fourfold.checkpoint.commit import step_name
from fourfold.checkpoint.folder import Folder, open_folder
from fourfold.checkpoint.local_shards import FLAT, LoadPlanner, SavePlanner
from fourfold.checkpoint.manifest import find_damage
from fourfold.checkpoint.state import Snapshot, TrainState
from fourfold.checkpoint.storage import Reader, Writer, tensors
from fourfold.mesh import agreements

T = TypeVar("T")
logger = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint was not saved; raised on all ranks, by the next call after the save."""


class Checkpoints:
    """The checkpoints of a run, in a folder or at an fsspec URL. All ranks create it and make the same calls.

    The ``keep_last`` newest remain; older ones are removed once the newest has been read back and is valid.
    ``timeout_s`` limits how long ranks wait for each other.

    Example:
        >>> with Checkpoints("runs/one", keep_last=3) as checkpoints:  # doctest: +SKIP
        ...     checkpoints.load(training)  # resumes from the newest valid one, if there is one
        ...     checkpoints.save(training)  # returns once it is copied
    """

    def __init__(
        self, where: str | os.PathLike[str], *, keep_last: int | None = None, timeout_s: float = 1800.0
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(
                f"keep_last={keep_last} would remove the checkpoint just saved; use at least 1, or None for all"
            )
        self.root: Folder = open_folder(where)
        self.keep_last = keep_last
        self._group = agreements.host_group(timeout_s)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._thread: threading.Thread | None = None
        self.saving: int | None = None  # the step of a save that has not been waited for
        self._error: SaveError | None = None

    def save(self, training: TrainState) -> None:
        """Start saving ``step-N``, with N = ``training.step``; training may continue when this returns.

        Waits for the previous save, and raises if that one failed.
        """
        self.wait()
        snapshot = state.capture(training).staged()
        self.saving = training.step
        self._thread = threading.Thread(
            target=self._save, args=(training.step, snapshot), name=f"save {step_name(training.step)}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress; raises on all ranks if it failed on any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self.saving = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def load(self, training: TrainState, step: int | None = None, *, before: int | None = None) -> int | None:
        """Load a checkpoint, by default the newest valid one; returns its step, or None if there is no checkpoint.

        With ``before``, load the newest valid one before that step and set the later ones aside.

        Every file is hashed first, each by one rank. Newer checkpoints that are damaged are set aside. If there are
        checkpoints but none is valid, that is an error: a run never starts over silently.
        """
        self.wait()
        if before is not None:
            self._set_aside_from(before)
        step = self._newest() if step is None else self._checked(step)
        if step is None:
            return None
        reader = Reader(self.root, step)
        values = state.read_values(reader.folder)
        targets = state.targets(training, tensors(reader.metadata), values)
        try:
            dcp_load(
                cast(Any, targets),
                storage_reader=reader,
                planner=LoadPlanner(**FLAT),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise ValueError(f"{reader.folder} cannot be loaded:\n{_error_text(error)}") from error
        state.resume(training, values)
        return step

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, oldest first; the same on all ranks."""
        self.wait()
        return self._on_rank_0(lambda: commit.steps(self.root))

    def close(self) -> None:
        """Wait for the last save, and destroy its own process group; that of the run stays."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._thread is not None:
            # The first error is the one to report; a save in progress may still succeed.
            self._thread.join()

    # -- the saving thread ---------------------------------------------------------------------------------------------------

    def _save(self, step: int, snapshot: Snapshot) -> None:
        failures: list[str] = []
        outcome = "was not saved"
        try:
            writer = Writer(self.root, step, snapshot.values)
            dcp_save(
                cast(Any, snapshot.tensors),
                storage_writer=writer,
                planner=SavePlanner(**FLAT),
                process_group=self._group,
            )
            outcome = "was saved, but older checkpoints were not removed"
            failures = self._retain(step)
        except (
            BaseException
        ) as error:  # CheckpointException, with the errors of all ranks, is not an Exception
            failures = [
                _error_text(error)
                if isinstance(error, CheckpointException)
                else f"rank {self._rank}: {error!r}"
            ]
        if any("FileNotFoundError" in failure for failure in failures):
            failures.append(
                "The folder has to be on storage that all nodes share, or a URL such as s3://bucket/run."
            )
        if failures:
            self._error = SaveError(f"{self.root}/{step_name(step)} {outcome}:\n" + "\n".join(failures))

    def _retain(self, newest: int) -> list[str]:
        """Remove all but the ``keep_last`` newest, if the newest is valid when it is read back."""
        keep = self.keep_last
        if keep is None:
            return []
        # The checkpoint just saved stays, also if a rolled-back run saves an earlier step than before.
        old = self._on_rank_0(lambda: commit.outdated(commit.steps(self.root), keep, newest))
        if not old:
            return []
        damage = self._damage(newest)
        if damage:
            return [f"it is damaged when read back, so {', '.join(map(step_name, old))} are kept", *damage]
        self._on_rank_0(lambda: commit.remove(self.root, old))
        return []

    # -- agreement between ranks ---------------------------------------------------------------------------------------

    def _newest(self) -> int | None:
        committed = self.steps()
        step, damaged = commit.newest_valid(committed, self._damage)
        if committed and step is None:
            lines = "\n".join(line for damage in damaged.values() for line in damage[:3])
            raise ValueError(
                f"none of the {len(committed)} checkpoints in {self.root} is valid; give another folder to start over\n{lines}"
            )
        for bad, damage in damaged.items():
            name = self._on_rank_0(lambda bad=bad: commit.set_aside(self.root, bad, "damaged"))  # type: ignore[misc]
            logger.warning(
                "%s is damaged and is now called %s: %s", step_name(bad), name, "; ".join(damage[:3])
            )
        return step

    def _set_aside_from(self, first: int) -> None:
        committed = self._on_rank_0(lambda: commit.steps(self.root))
        for step in (s for s in committed if s >= first):
            name = self._on_rank_0(lambda step=step: commit.set_aside(self.root, step, "undone"))  # type: ignore[misc]
            logger.warning("%s is after the step rolled back to, and is now called %s", step_name(step), name)

    def _checked(self, step: int) -> int:
        commit.select(self.root, self.steps(), step)
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

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result on all ranks; if it fails, it fails on all."""
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


def _error_text(error: CheckpointException) -> str:
    """The errors of all ranks, without their tracebacks."""
    return "\n".join(
        f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())
    )
