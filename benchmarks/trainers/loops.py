"""Lightning's trainer, and a loop of one's own with Lightning Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainers.outcome import Outcome, Shape, ranks_of
from benchmarks.trainers.recipes import ROWS, STEPS, Rows, model


def lightning(shape: Shape | None, folder: Path) -> Outcome:
    """Lightning's trainer on its strategy for models that place themselves; without a shape the stock one."""
    import lightning as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from examples.lightning_module import OnGrid
    from fourfold import Grid

    seen: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    class Watched(OnGrid):
        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = super().training_step(batch, _)
            seen["loss"].append(float(loss.detach()))
            return loss

        def configure_gradient_clipping(self, *positional: Any, **options: Any) -> None:
            super().configure_gradient_clipping(*positional, **options)
            seen["grad_norm"].append(float(self.norm))

    module = Watched(model, shape, lr=1e-3)
    parts, part = (1, 0) if shape is None else (shape[0] * shape[1], Grid.create(shape).batch_rank)
    strategy: Any = "auto"
    if shape is not None:
        strategy = ModelParallelStrategy(data_parallel_size=parts, tensor_parallel_size=shape[2] * shape[3])
    trainer = pl.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        strategy=strategy,
        accelerator="cpu",
        devices=1 if shape is None else ranks_of(shape),
        use_distributed_sampler=False,  # it would shuffle
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    rows = Rows(64)
    sampler = torch.utils.data.DistributedSampler(rows, parts, part, shuffle=False)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=ROWS // parts, sampler=sampler))
    return Outcome(seen, module.whole_weights())


def fabric(shape: Shape | None, _: Path) -> Outcome:
    """Fabric's model and optimizer in a loop; without a shape a stock loop, whose optimizer and norm are PyTorch's."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from fourfold.export.live import full_parameters

    lm = model()
    loader = torch.utils.data.DataLoader(Rows(ROWS * STEPS), batch_size=ROWS)
    if shape is None:
        losses, norms = [], []
        fabric = Fabric(accelerator="cpu", devices=1)
        stock, optimizer = fabric.setup(lm, torch.optim.AdamW(lm.parameters(), lr=1e-3, eps=1e-5))
        for batch in fabric.setup_dataloaders(loader):
            loss = stock(**batch).loss
            fabric.backward(loss)
            norms.append(float(torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5)))
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: tensor.detach() for name, tensor in lm.state_dict().items()}
        return Outcome({"loss": losses, "grad_norm": norms}, weights)
    from examples.fabric_loop import place, steps

    parts = shape[0] * shape[1]
    strategy = ModelParallelStrategy(
        place(shape), data_parallel_size=parts, tensor_parallel_size=ranks_of(shape) // parts
    )
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=ranks_of(shape))
    fabric.launch()
    loader = torch.utils.data.DataLoader(loader.dataset, batch_size=ROWS // parts)
    losses, norms = zip(*steps(fabric, lm, loader, lr=1e-3), strict=True)
    weights = {name: tensor.clone() for name, tensor in full_parameters(lm, lm.report)}
    return Outcome({"loss": list(losses), "grad_norm": list(norms)}, weights)
