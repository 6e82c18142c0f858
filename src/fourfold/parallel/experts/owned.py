"""Experts that ranks own: each z rank has whole experts, those that it stores, and tokens travel to them and back.

    forward    count the rows that go to each expert, tell the ranks, and read the sizes on the host
               send each row to the rank that owns its expert (dispatch): k of them for each token
               the model's own experts, on local experts, with one expert and a weight of 1 for each row
               send the rows back (combine)
               add up the k results of a token, in the order in which the router chose them
    backward   the same, the other way round; gradients of weights are complete on z

No token is dropped, and nothing is padded. Storage is that of experts that are gathered: the shard over z of [experts, out, in].
With x or y the inner features of owned experts are sharded as well (`cut.py`), around what is here.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import UnsupportedError
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.mesh.rows import exchange_counts, send_rows, sizes_of

_AXIS: Axis = "z"


def own_experts(module: nn.Module, name: str, grid: Grid) -> list[str]:
    """Let the stock experts compute with the experts of this z rank; returns a description of each change."""
    inner, collectives, ranks = module.forward, grid.collectives, grid.z
    experts = module.__dict__["num_experts"]
    own = experts // ranks
    # Hidden states, choices and their weights, by whatever name the class gives them.
    signature = inspect.signature(inner)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden, choices, weights = _arguments(name, signature.bind(*args, **kwargs))
        width, chosen = hidden.shape[-1], choices.shape[-1]
        # Rows by expert, and so by rank: ranks own neighbours.
        of_rows = choices.reshape(-1)
        order = torch.argsort(of_rows, stable=True)
        counts = of_rows.new_zeros(experts).index_add_(0, of_rows, torch.ones_like(of_rows)).view(ranks, own)
        told = exchange_counts(counts, collectives, _AXIS, name)
        sizes = sizes_of(counts, told, collectives, _AXIS, of_rows.numel())
        rows = hidden.reshape(-1, width)[order // chosen]
        arrived = send_rows(rows, sizes, collectives, _AXIS, "dispatch", name)
        done = inner(arrived, _own_choices(told, sum(sizes.received)), arrived.new_ones(len(arrived), 1))
        back = send_rows(done, sizes.backwards(), collectives, _AXIS, "combine", name)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        by_choice = back[place].view(-1, chosen, width) * weights.reshape(-1, chosen, 1)
        return by_choice.sum(1).to(hidden.dtype).view(hidden.shape)

    module.forward = forward
    module.__dict__["num_experts"] = own
    return [f"num_experts {experts} -> {own}"]


def _own_choices(told: Tensor, rows: int) -> Tensor:
    """The expert, counted from the first that this rank owns, of each row that arrived."""
    if rows == 0:  # a row of zeros stands for them
        return told.new_zeros(1, 1)
    ranks, own = told.shape
    experts = torch.arange(own, device=told.device).repeat(ranks)
    return experts.repeat_interleave(told.reshape(-1), output_size=rows).unsqueeze(1)


def _arguments(name: str, bound: inspect.BoundArguments) -> tuple[Tensor, Tensor, Tensor]:
    given = list(bound.arguments.values())
    if len(given) == 3 and all(isinstance(each, Tensor) for each in given):
        hidden, choices, weights = given
        tokens = hidden.numel() // hidden.shape[-1]
        if (
            choices.numel() == weights.numel() == tokens * choices.shape[-1]
            and not choices.is_floating_point()
        ):
            return hidden, choices, weights
    shapes = [tuple(each.shape) if isinstance(each, Tensor) else each for each in given]
    raise UnsupportedError(
        f"{name} is called with {shapes}, not with hidden states and k choices and weights for each of their tokens, so tokens cannot be sent "
        "to experts; use experts='cut'"
    )
