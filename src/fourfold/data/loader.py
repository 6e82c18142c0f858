"""Loads this rank's rows of each global batch, prefetched by a thread. It is stateless: the caller counts samples.

All x and y ranks of a replica read the same rows: on one host they share the file's page cache, so the disk is read once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fourfold.data.mixture import Mixture
from fourfold.data.samples import Sample
from fourfold.mesh.grid import Grid


@dataclass(frozen=True)
class Batch:
    """This rank's rows, and the range of global samples of the step.

    ``inputs`` are those of a Hugging Face causal LM, each [rows, length], without an attention mask: the positions say
    where documents start. Not every model respects them; `check_documents_stay_apart` tests it.
    """

    inputs: dict[str, Tensor]
    first_sample: int
    next_sample: int  # to save: the number of samples after this step


class Loader:
    """Batches of a mixture for one rank of a grid.

    Example:
        >>> loader = Loader(mixture, grid, global_batch=512)       # doctest: +SKIP
        >>> for batch in loader.batches(samples_seen):             # doctest: +SKIP
        ...     loss = model(**batch.inputs).loss
        ...     samples_seen = batch.next_sample
    """

    def __init__(self, mixture: Mixture, grid: Grid, global_batch: int, *, prefetch_batches: int = 2) -> None:
        self._mixture, self._batch, self._prefetch_batches = mixture, global_batch, prefetch_batches
        self._rows = grid.local_rows(global_batch)
        self._pinned = grid.device.type == "cuda"  # copies from pinned memory are asynchronous

    def batches(self, first_sample: int = 0, rows: slice | None = None) -> Iterator[Batch]:
        """An endless stream of batches from a global sample on; ``rows`` overrides this rank's rows of each batch."""
        reader = ThreadPoolExecutor(1, thread_name_prefix="fourfold-data")
        ahead: deque[Future[Batch]] = deque()
        try:
            while True:
                while len(ahead) <= self._prefetch_batches:
                    ahead.append(reader.submit(self.read, first_sample, rows))
                    first_sample += self._batch
                yield ahead.popleft().result()
        finally:
            reader.shutdown(wait=False, cancel_futures=True)

    def read(self, first_sample: int, rows: slice | None = None) -> Batch:
        """This rank's rows of the step that starts at a global sample."""
        rows = rows or self._rows
        first, stop = first_sample + rows.start, first_sample + rows.stop
        samples = self._mixture.samples(first, stop)
        columns = zip(Sample._fields, zip(*samples, strict=True), strict=True)
        inputs = {name: self._stacked(rows) for name, rows in columns}
        return Batch(inputs, first_sample, first_sample + self._batch)

    def _stacked(self, rows: tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]) -> Tensor:
        stacked = torch.from_numpy(np.stack(rows))
        return stacked.pin_memory() if self._pinned else stacked
