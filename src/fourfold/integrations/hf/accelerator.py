"""An accelerate `Accelerator` whose processes are the parts of a batch on a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fourfold.errors import UnsupportedError
from fourfold.mesh.grid import Grid
from fourfold.optim.clip import clip_grad_norm_
from fourfold.weights.api import no_sync


class GridAccelerator(Accelerator):  # type: ignore[misc]
    """Counts ranks as data loaders and metrics should: x and y neighbours read the same rows, and count once.

    Example:
        >>> accelerator = GridAccelerator(grid)  # doctest: +SKIP
        >>> loader = accelerator.prepare(DataLoader(rows, batch_size=4))  # of each of data * z parts  # doctest: +SKIP
    """

    def __init__(self, grid: Grid, **options: Any) -> None:
        self.grid = grid
        super().__init__(**options)
        if self.dispatch_batches or self.split_batches:
            raise UnsupportedError(
                f"dispatch_batches={self.dispatch_batches}, split_batches={self.split_batches}: each rank reads its own rows on a grid; "
                "leave them out"
            )
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        return self.grid.batch_ranks

    @property
    def process_index(self) -> int:
        return self.grid.batch_rank

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The model as it is: `parallelize` has placed it, and sums its gradients."""
        return model

    def prepare_data_loader(self, data_loader: DataLoader[Any], *positional: Any, **options: Any) -> Any:
        is_streamed = isinstance(data_loader.dataset, IterableDataset)
        if is_streamed and self.grid.batch_ranks > 1 and not data_loader.drop_last:
            raise UnsupportedError(
                f"a data set without a length, on data*z={self.grid.batch_ranks}: rows that make its last batch even would count twice; use "
                "dataloader_drop_last=True"
            )
        return super().prepare_data_loader(data_loader, *positional, **options)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with no_sync(model):
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        if norm_type != 2:
            raise ValueError(
                f"norm_type={norm_type}: gradients on a grid are clipped by their 2-norm; use norm_type=2"
            )
        return clip_grad_norm_(parameters, max_norm, self.grid)

    def gather(self, tensor: Any) -> Any:
        """From every part of the batch, once."""
        same = self.grid.x * self.grid.y

        def once(gathered: Tensor) -> Tensor:
            each: Tensor = gathered.unflatten(0, (self.grid.batch_ranks * same, -1))
            return each[::same].flatten(0, 1)

        gathered = super().gather(tensor)
        return gathered if same == 1 else recursively_apply(once, gathered)

    def last_batch(self, rows: int) -> int:
        """How many rows of the global batch there really are, if it is the last one of an epoch; else all of them.

        Counted here: after a resume inside an epoch accelerate's own remainder is that of one rank's rows.
        """
        state, whole = self.gradient_state, rows * self.grid.batch_ranks
        loader = state.active_dataloader if state.end_of_dataloader else None
        if loader is None or isinstance(loader.dataset, IterableDataset):
            return whole
        return len(loader.dataset) % whole or whole

    def repeated_rows(self, rows: int) -> slice:
        """Rows of this rank's batch that are only there to make the last batch of an epoch even."""
        real = self.last_batch(rows) - self.grid.batch_rank * rows
        return slice(min(rows, max(0, real)), rows)
