"""What a preference loss and its metrics need of sharded logits: a few numbers for each token, equal on x and y neighbours."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.mesh.grid import Grid
from fourfold.parallel.loss.chunk_size import piece_tokens
from fourfold.parallel.loss.chunked import softmax_over_ranks
from fourfold.parallel.loss.cross_entropy import own_columns, own_labels, tokens_of_all
from fourfold.parallel.loss.head import IGNORE_INDEX


class TokenStatistics(NamedTuple):
    """Of the distribution that predicts each label, in the shape of the labels, without gradients; 0 where there is no label."""

    entropy: Tensor
    mean_logit: Tensor
    is_top1: Tensor  # is the label the token with the highest logit, and of several the first?
    log_sum_sq_probs: Tensor


@torch.no_grad()
def token_statistics(logits: Tensor, labels: Tensor, grid: Grid, *, vocab_size: int) -> TokenStatistics:
    """Beside `token_log_probs`, of the same logits and labels: for metrics.

    Example:
        >>> labels = torch.full_like(ids, IGNORE_INDEX)
        >>> labels[:, :-1] = ids[:, 1:]
        >>> found = token_statistics(model(input_ids=ids).logits, labels, grid, vocab_size=131)
        >>> found.entropy.shape == ids.shape
        True
    """
    own = own_labels(logits, labels, grid).to(logits.device)
    first, _ = own_columns(logits, grid, vocab_size)
    size = piece_tokens(-(-vocab_size // grid.x))  # equal on all ranks
    pieces = zip(logits.flatten(0, -2).split(size), own.flatten().split(size), strict=True)
    rows = torch.cat([_statistics(piece, label, first, vocab_size, grid) for piece, label in pieces], dim=-1)
    whole = [tokens_of_all(row.view(own.shape), labels, grid) for row in rows]
    return TokenStatistics(whole[0], whole[1], whole[2] > 0, whole[3])


def _statistics(logits: Tensor, labels: Tensor, first: int | Tensor, vocabulary: int, grid: Grid) -> Tensor:
    """[4, tokens], in fp32 as `softmax_over_ranks` computes."""
    found = softmax_over_ranks(logits, labels, first, IGNORE_INDEX, grid.collectives, "x")
    here, wide = found.exponentials, logits.float()
    sums = torch.stack([(here * wide).sum(-1), wide.sum(-1), here.square().sum(-1)])
    grid.collectives.all_reduce(sums, "x", "loss").wait()
    # The first column with the highest logit, as `argmax` finds it: by MAX of what falls with the column.
    found_here, column = (
        (wide.max(-1)) if wide.shape[-1] else (sums.new_full(labels.shape, -torch.inf), labels)
    )
    highest = found_here.clone()
    grid.collectives.all_reduce(highest, "x", "loss", dist.ReduceOp.MAX).wait()
    before = torch.where(found_here == highest, -(column + first), torch.iinfo(torch.int64).min)
    grid.collectives.all_reduce(before, "x", "loss", dist.ReduceOp.MAX).wait()
    expected, total, squares = sums
    scores = torch.stack(
        [
            found.log_z - expected / found.total,
            total / vocabulary,
            (-before == labels).float(),
            squares.log() - 2 * found.total.log(),
        ]
    )
    return torch.where(found.counted, scores, 0.0)
