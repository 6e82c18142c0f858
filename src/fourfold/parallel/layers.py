"""The layers besides linears: the token embedding, and norms.

The embedding's features are sharded over y and its vocabulary over x, as in the head that it may be tied to. Norms over features
that are sharded over an axis sum their statistics over it, once in each direction: normalising each shard by its own
statistics would be cheaper, and a different model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.hf.norm_formula import Formula
from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.axes import Axis
from fourfold.mesh.exchange import scatter
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_both, sum_forward
from fourfold.parallel.dropout import Dropout
from fourfold.parallel.sequence import Tokens
from fourfold.weights.api import read_weight


class Embedding4D(nn.Module):
    """Replaces `nn.Embedding`.

    Each x rank holds a range of the rows and looks up the tokens that fall into it. The results are summed over x, which
    is exact, because all terms but one are zero. If x does not divide the vocabulary, the last ranks have fewer rows; a
    state dict contains the vocabulary without padding.
    """

    # The backward of a lookup does not read the weight.
    is_lookup = True

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        grid: Grid,
        *,
        padding_idx: int | None = None,
        scale: float | None = None,
        dropout: Dropout | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        super().__init__()
        self.name, self.grid = name, grid
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx
        self.weight = weight
        self._rows = chunk(self.num_embeddings, grid.x, grid.coordinate("x"))
        self._scale = scale
        self._dropout = dropout
        self._tokens = tokens

    def forward(self, input_ids: Tensor) -> Tensor:
        check_range(input_ids, self.num_embeddings, f"an input id of {self.name}")
        weight = read_weight(self, "weight")
        local = input_ids - self._rows.start
        here = (local >= 0) & (local < weight.shape[0])
        out = nn.functional.embedding(torch.where(here, local, 0), weight)
        if self.padding_idx is not None:
            # As in nn.Embedding, this row gets no gradient.
            frozen = input_ids == self.padding_idx
            out = torch.where(frozen.unsqueeze(-1), out.detach(), out)
        out = self._sum(out * here.unsqueeze(-1), input_ids)
        if self._scale is not None:
            # Rounded to the dtype of the computation, as in Hugging Face's scaled embeddings.
            out = out * float(torch.tensor(self._scale).to(out.dtype))
        if self._dropout is not None:
            self._dropout.enter("y", *(("x",) if self._tokens else ()))
        return out

    def _sum(self, parts: Tensor, input_ids: Tensor) -> Tensor:
        if self._tokens is None:
            return sum_forward(parts, self.grid.collectives, "x", "activation", self.name)
        self._tokens.begin(input_ids)
        parts = parts.view(1, -1, parts.shape[-1])
        own = scatter(parts, self.grid.collectives, "x", 1, "activation", self.name)
        return self._tokens.to_batch_shape(own)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} rows over x, {self.embedding_dim} features over y"


def check_range(ids: Tensor, vocabulary: int | Tensor, what: str, ignored: int | None = None) -> None:
    """Raise for ids outside the vocabulary, as one process does; no rank has them, and they would become zeros."""
    inside = (ids >= 0) & (ids < vocabulary)
    if ignored is not None:
        inside |= ids == ignored
    # On CUDA the device checks and the host does not wait. There is no public name for it (torch 2.13.0).
    torch._assert_async(inside.all(), f"{what} is outside the vocabulary")


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
