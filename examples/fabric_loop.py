"""A loop of your own with Lightning Fabric, on a grid, for its `ModelParallelStrategy`.

shape = (1, 2, 1, 4)  # (data, z, y, x)
strategy = ModelParallelStrategy(place(shape), data_parallel_size=data * z, tensor_parallel_size=y * x)
fabric = Fabric(strategy=strategy, devices=8)
fabric.launch()
for loss, norm in steps(fabric, make_model(), DataLoader(rows, batch_size=4), lr=1e-5):
    fabric.print(loss, norm)
"""

from collections.abc import Callable, Iterator

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import fourfold as ff


def place(shape: tuple[int, int, int, int]) -> Callable[[nn.Module, object], nn.Module]:
    """What Fabric calls with a model and its own mesh; `parallelize` makes the mesh of a grid."""

    def parallelize_fn(model: nn.Module, _: object) -> nn.Module:
        model.grid = ff.Grid.create(shape)
        model.report = ff.parallelize(model, model.grid)
        return model

    return parallelize_fn


def steps(fabric: Fabric, model: nn.Module, loader: DataLoader, lr: float) -> Iterator[tuple[float, float]]:
    """Train for an epoch: the loss of the global batch and the norm of its gradient, after each step."""
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(
        ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=lr, eps=1e-5)
    )
    for batch in fabric.setup_dataloaders(
        loader
    ):  # data * z parts read different rows, y * x neighbours the same
        loss = model(**batch).loss
        fabric.backward(loss)
        norm = ff.clip_grad_norm_(model.parameters(), 0.5, model.grid)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), norm.item()
