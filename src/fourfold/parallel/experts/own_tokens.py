"""Around experts that x ranks own: each x rank sends rows of its own tokens alone, with all their features.

    forward    gather the hidden features over y     once for experts and router
               take this x rank's tokens             of those that x ranks all have an equal part; sharded by tokens, it has no others
               owned experts                         over y their inner features are sharded: a part of a sum
               reduce-scatter over y
               gather the tokens over x              where x ranks all have them
    backward   the same, the other way round

y ranks send the same rows, each for its part of the inner features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.hf.experts import ExpertStorage
from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.exchange import gather_for_all, scatter
from fourfold.parallel.experts.cut import routed, show_inner_features
from fourfold.parallel.experts.whole_features import WholeFeatures


def send_own_tokens(module: nn.Module, name: str, whole: WholeFeatures, storage: ExpertStorage) -> list[str]:
    """Let owned experts get the tokens of this x rank; returns a description of each change."""
    inner, grid, by_tokens = module.forward, whole.grid, whole.by_tokens

    def forward(hidden: Tensor, *routing: Tensor, **by_name: Tensor) -> Tensor:
        rows = hidden.numel() // hidden.shape[-1]
        mine = slice(0, rows) if by_tokens else chunk(rows, grid.x, grid.coordinate("x"))

        def own(tensor: Tensor) -> Tensor:
            return routed(tensor, rows, name, whole)[mine]

        features = whole.of(hidden, name).view(-1, whole.hidden)[mine]
        parts = inner(features, *map(own, routing), **{key: own(each) for key, each in by_name.items()})
        done = scatter(parts, grid.collectives, "y", 1, "activation", name)
        return (done if by_tokens else _of_all(done, rows)).view(hidden.shape)

    def _of_all(own: Tensor, rows: int) -> Tensor:
        """What the x ranks have, the last ones perhaps of fewer tokens."""
        missing = -(-rows // grid.x) - len(own)
        if missing:
            own = torch.cat([own, own.new_zeros(missing, own.shape[1])])
        return gather_for_all(own, grid, "x", 0, "activation", name)[:rows]

    module.forward = forward
    return show_inner_features(module, storage, grid.y)
