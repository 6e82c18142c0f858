"""Compare a model with streamed weights to the same model in one process."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold import Grid, Report
from fourfold.weights.api import backend_of
from tests.models import (
    assert_shards_close,
    batch,
    gradients,
    local_gradients,
)

Shape = tuple[int, int, int, int]
ONLY_Z: Shape = (1, 2, 1, 1)
BUNDLE_BYTES = 1024  # in the small models only norms and biases are this small
PLENTY = 10**9


def overlap(**options: Any) -> ff.Overlap:
    return ff.Overlap(**{"bundle_bytes": BUNDLE_BYTES} | options)


class Pair:
    """A model on the grid, and the same model in one process."""

    def __init__(
        self,
        stock: nn.Module,
        grid: Grid,
        how: ff.Overlap | None = None,
        vocabulary: int = 131,
        **options: Any,
    ) -> None:
        self.grid, self.vocabulary = grid, vocabulary
        self.stock, self.model = stock, copy.deepcopy(stock)
        self.report: Report = ff.parallelize(
            self.model, grid, weights="streamed", overlap=how or overlap(), **options
        )

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        ids, labels = batch(8, seed=seed)
        return ids % self.vocabulary, torch.where(labels == -100, labels, labels % self.vocabulary)

    def loss(self, seed: int = 2, **options: Any) -> Tensor:
        ids, labels = self.batch(seed)
        rows = self.grid.local_rows(len(ids))
        loss: Tensor = self.model(input_ids=ids[rows], labels=labels[rows], **options).loss
        return loss

    def stock_loss(self, seed: int = 2, **options: Any) -> Tensor:
        ids, labels = self.batch(seed)
        loss: Tensor = self.stock(input_ids=ids, labels=labels, **options).loss
        return loss

    def zero_grad(self) -> None:
        self.stock.zero_grad()
        self.model.zero_grad()

    def assert_exact_step(self, seed: int = 2) -> None:
        self.zero_grad()
        ours, expected = self.loss(seed), self.stock_loss(seed)
        ours.backward()
        expected.backward()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0.0)
        self.assert_gradients()

    def assert_gradients(self) -> None:
        assert_shards_close(local_gradients(self.model), gradients(self.stock), self.report, self.grid)

    def change_weights(self) -> None:
        """Change all weights in place, as an optimizer does."""
        with torch.no_grad():
            for model in (self.stock, self.model):
                for i, parameter in enumerate(model.parameters()):
                    parameter.mul_(1.1 + 0.1 * (i % 2))


def gathered(model: nn.Module) -> dict[str, int]:
    """Bytes of the blocks whose memory is allocated; there is no public name that leads to it."""
    flats = {w.name: w._flat for w in backend_of(model)._weights}
    sizes = {name: flat.untyped_storage().size() for name, flat in flats.items() if flat is not None}
    return {name: size for name, size in sizes.items() if size}


def train(pair: Pair, steps: int) -> None:
    for seed in range(steps):
        pair.zero_grad()
        pair.loss(seed).backward()
