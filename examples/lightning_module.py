"""A LightningModule on a grid, for Lightning's own `ModelParallelStrategy`.

    shape = (1, 2, 1, 4)  # (data, z, y, x)
    strategy = ModelParallelStrategy(data_parallel_size=data * z, tensor_parallel_size=y * x)
    Trainer(strategy=strategy, devices=8, enable_checkpointing=False).fit(OnGrid(make_model, shape, lr=1e-5), loader)

Checkpoints are Fourfold's own: `fourfold.Checkpoints(folder).save(TrainState(...))`.
"""

from collections.abc import Callable

import lightning as pl
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.export.live import full_parameters


class OnGrid(pl.LightningModule):
    """A causal LM; without a shape the stock one, on one device."""

    def __init__(
        self, make_model: Callable[[], nn.Module], shape: tuple[int, int, int, int] | None, lr: float
    ) -> None:
        super().__init__()
        self.make_model, self.shape, self.lr = make_model, shape, lr
        self.lm: nn.Module | None = None

    def configure_model(self) -> None:
        if self.lm is None:
            self.lm = self.make_model()
            if self.shape is not None:
                self.grid = ff.Grid.create(self.shape)
                self.report = ff.parallelize(self.lm, self.grid)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.lm(**batch).loss  # the mean of the global batch, on every rank

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.shape is None else ff.sharded_optimizer(torch.optim.AdamW)
        return kind(self.lm.parameters(), lr=self.lr, eps=1e-5)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.shape is None:
            self.norm = nn.utils.clip_grad_norm_(self.lm.parameters(), gradient_clip_val)
        else:
            self.norm = ff.clip_grad_norm_(self.lm.parameters(), gradient_clip_val, self.grid)

    def whole_weights(self) -> dict[str, Tensor]:
        """The tensors of the Hugging Face model, on every rank."""
        if self.shape is None:
            return {name: tensor.detach() for name, tensor in self.lm.state_dict().items()}
        return {name: tensor.clone() for name, tensor in full_parameters(self.lm, self.report)}
