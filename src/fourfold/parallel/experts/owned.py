"""Experts that ranks own: each rank of z, of x or of both has whole experts, those that it stores, and tokens travel to them and back.

    forward    count the rows that go to each expert, tell the ranks, and read the sizes on the host
               send each row to the rank that owns its expert (dispatch): k of them for each token
               the model's own experts, on local experts, with one expert and a weight of 1 for each row
               send the rows back (combine)
               add up the k results of a token, in the order in which the router chose them
    backward   the same, the other way round; gradients of weights are complete on these axes

No token is dropped, and nothing is padded. Over z storage is that of experts that are gathered: the shard over z of [experts, out, in]. Over x
the same dim is sharded, outside of z: expert e of E is at x = e // (E/X), and over both at z = (e mod E/X) // (E/(X Z)) there.
Features are sharded as well, around what is here: over y and x (`cut.py`), or, where x ranks own experts, over y (`own_tokens.py`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import UnsupportedError
from fourfold.mesh.axes import Z_AND_X, Axis
from fourfold.mesh.grid import Grid
from fourfold.mesh.rows import exchange_counts, send_rows, sizes_of


def own_experts(module: nn.Module, name: str, grid: Grid, axis: Axis) -> list[str]:
    """Let the stock experts compute with the experts of this rank of ``axis``; returns a description of each change."""
    inner, collectives, ranks = module.forward, grid.collectives, grid.size(axis)
    experts = module.__dict__["num_experts"]
    own = experts // ranks
    # Hidden states, choices and their weights, by whatever name the class gives them.
    signature = inspect.signature(inner)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden, choices, weights = _arguments(name, signature.bind(*args, **kwargs))
        width, chosen = hidden.shape[-1], choices.shape[-1]
        # Rows by expert, and so by rank: ranks own neighbours.
        of_rows = choices.reshape(-1)
        if axis == Z_AND_X:
            of_rows = _by_z_and_x(of_rows, experts, grid)
        order = torch.argsort(of_rows, stable=True)
        counts = of_rows.new_zeros(experts).index_add_(0, of_rows, torch.ones_like(of_rows)).view(ranks, own)
        told = exchange_counts(counts, collectives, axis, name)
        sizes = sizes_of(counts, told, collectives, axis, of_rows.numel(), chosen)
        rows = hidden.reshape(-1, width)[order // chosen]
        arrived = send_rows(rows, sizes, collectives, axis, "dispatch", name)
        done = inner(arrived, _own_choices(told, sum(sizes.received)), arrived.new_ones(len(arrived), 1))
        back = send_rows(done, sizes.backwards(), collectives, axis, "combine", name)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        by_choice = back[place].view(-1, chosen, width) * weights.reshape(-1, chosen, 1)
        return by_choice.sum(1).to(hidden.dtype).view(hidden.shape)

    module.forward = forward
    module.__dict__["num_experts"] = own
    return [f"num_experts {experts} -> {own}"]


def _by_z_and_x(choices: Tensor, experts: int, grid: Grid) -> Tensor:
    """The place of each expert in the order of the ranks of z and x, z outside; storage has x outside."""
    of_x, own = experts // grid.x, experts // (grid.x * grid.z)
    at_x, at_z = choices // of_x, choices % of_x // own
    return (at_z * grid.x + at_x) * own + choices % own


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
