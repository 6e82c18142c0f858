"""Norms over features that are sharded over an axis: the statistics are summed over it, once in each direction.

Normalising each shard by its own statistics would be cheaper, and a different model.
"""

from __future__ import annotations

from torch import Tensor, nn

from fourfold.hf.norm_formula import Formula
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_both
from fourfold.parallel.sequence import Tokens
from fourfold.weights.api import read_weight


class Norm4D(nn.Module):
    """A norm over ``features`` that are sharded over ``axis``."""

    def __init__(
        self,
        name: str,
        formula: Formula,
        features: int,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        grid: Grid,
        axis: Axis,
        *,
        gradient_axes: tuple[Axis, ...] = (),
        tokens: Tokens | None = None,
    ) -> None:
        super().__init__()
        self.name, self.formula, self.features = name, formula, features
        self.grid, self.axis = grid, axis
        # Where tokens are sharded, each rank has the part of the weight's gradient that comes from its tokens.
        self._gradient_axes = gradient_axes
        # Set outside of blocks only, where the model's code reads a tensor of the usual shape next.
        self._tokens = tokens
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        expected = self.features // self.grid.size(self.axis)
        if x.shape[-1] != expected:
            raise ValueError(
                f"{self.name} expects {expected} features on each rank (its {self.features} over "
                f"{self.axis}={self.grid.size(self.axis)}), got {x.shape[-1]}; use {self.axis}=1"
            )
        weight, bias = (
            None if self._parameters[key] is None else read_weight(self, key, self._gradient_axes)
            for key in ("weight", "bias")
        )
        out = self.formula.apply(x, self.features, weight, bias, self._total)
        return out if self._tokens is None else self._tokens.to_batch_shape(out)

    def _total(self, part: Tensor) -> Tensor:
        return sum_both(part, self.grid.collectives, self.axis, "norm", self.name)

    def extra_repr(self) -> str:
        return f"{self.features} features over {self.axis}, {self.formula}"
