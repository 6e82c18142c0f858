"""Sharded optimizers: any element-wise torch optimizer, on this rank's plain tensors instead of the DTensors.

`torch.optim.AdamW(model.parameters())` gives the same results, but its first step makes DTensor propagate placements for
every operation on every parameter, which takes minutes for a deep model on a mesh of four axes (docs/decisions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fourfold.mesh.axes import AXES
from fourfold.optim.adamw_bf16 import AdamWBf16

# An optimizer that reads whole matrices would give different results on different grids.
ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    AdamWBf16,
)


def sharded_optimizer(optimizer_class: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same optimizer class, for the parameters of a parallel model.

    Example:
        >>> optimizer = sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=3e-4)
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    if optimizer_class not in ELEMENTWISE:
        raise ValueError(
            f"{optimizer_class.__name__} is not known to be element-wise, so on shards its results could differ from "
            f"those of one process; use one of {', '.join(c.__name__ for c in ELEMENTWISE)}"
        )

    class ShardedOptimizer(optimizer_class):  # type: ignore[misc, valid-type]
        def __init__(self, parameters: Iterable[Any], *positional: Any, **options: Any) -> None:
            self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
            groups = list(parameters)
            if groups and isinstance(groups[0], Mapping):
                local = [{**g, "params": [self._local(p) for p in g["params"]]} for g in groups]
            else:
                local = [{"params": [self._local(p) for p in groups]}]
            super().__init__(local, *positional, **options)

        def _local(self, parameter: nn.Parameter) -> nn.Parameter:
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"a parameter is given as a {type(parameter).__name__}; pass model.parameters(), or a list of groups "
                    "of them ({'params': ..., 'lr': ...})"
                )
            if not _is_sharded(parameter):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not a shard on the grid: it is not of a parallel model, or "
                    "it is gathered, as FSDP2 leaves it after a forward without a backward, and would not be trained; make the "
                    "optimizer after parallelize(model, grid) and before the first forward"
                )
            shard = nn.Parameter(
                cast(DTensor, parameter.detach()).to_local(), requires_grad=parameter.requires_grad
            )
            self._pairs.append((parameter, shard))
            return shard

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """``closure`` computes the loss and its gradients, once; it is returned."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for parameter, shard in self._pairs:
                # FSDP2 may have moved the shard into padded storage since the last step. `to_local` takes ten times as long.
                shard.data = parameter._local_tensor  # type: ignore[attr-defined]
                gradient = parameter.grad
                shard.grad = None if gradient is None else gradient._local_tensor  # type: ignore[attr-defined]
            super().step()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            for parameter, _ in self._pairs:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    ShardedOptimizer.__name__ = ShardedOptimizer.__qualname__ = f"Sharded{optimizer_class.__name__}"
    return ShardedOptimizer


def _is_sharded(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    is_on_grid = parameter.device_mesh.mesh_dim_names == AXES
    return not (is_on_grid and isinstance(parameter.placements[AXES.index("z")], Replicate))
