"""Chunks of the loss are alike, except for the first, which allocates the head's gradient, and the last: three are enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from fourfold.dry_run.recorder import Recorder, replaced
from fourfold.parallel.loss import chunked

_TRACED = 3


def repeated_chunks(recorder: Recorder) -> AbstractContextManager[None]:
    """Inside, the loss computes `_TRACED` of its chunks, and the second is recorded for all that are left out."""

    def starts(tokens: int, size: int) -> Iterator[int]:
        every = range(0, tokens, size)
        if len(every) <= _TRACED:
            yield from every
            return
        yield every[0]
        before = recorder.position
        yield every[1]
        recorder.repeat(before, len(every) - _TRACED)
        yield every[-1]

    return replaced(chunked, "chunk_starts", starts)
