"""The token embedding: features sharded over y and the vocabulary over x, as in the head that it may be tied to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel.dropout import Dropout
from fourfold.parallel.sequence import Tokens, reduce_scatter_tokens
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
        return self._tokens.to_batch_shape(reduce_scatter_tokens(parts, self.grid.collectives, self.name))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} rows over x, {self.embedding_dim} features over y"


def check_range(ids: Tensor, vocabulary: int | Tensor, what: str, ignored: int | None = None) -> None:
    """Raise for ids outside the vocabulary, as one process does; no rank has them, and they would become zeros."""
    inside = (ids >= 0) & (ids < vocabulary)
    if ignored is not None:
        inside |= ids == ignored
    # On CUDA the device checks and the host does not wait. There is no public name for it (torch 2.13.0).
    torch._assert_async(inside.all(), f"{what} is outside the vocabulary")
