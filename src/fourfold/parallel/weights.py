"""Weights on (z, data): stored in parts over z, gathered for the work of one block, their gradients summed back."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard

from fourfold.grid import Grid
from fourfold.parallel.refused import Refused

Precision = Literal["fp32", "bf16"]


def shard_weights(
    model: nn.Module,
    grid: Grid,
    blocks: Sequence[nn.Module],
    precision: Precision,
    *,
    embedding: nn.Module | None = None,
    head: nn.Module | None = None,
) -> None:
    """FSDP2 over z, a group for each block and one for what is left; the data axis is reduced behind it.

    Master weights and the reduction of gradients are fp32 in either precision; in bf16 the gathered weights, and so
    the work, are bf16. ``embedding`` and ``head``, where they are not tied, are groups of their own.
    """
    _check_tied(model, [*blocks, *(m for m in (embedding, head) if m is not None)])
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = functools.partial(
        fully_shard, mesh=grid.mesh, dp_mesh_dims=DataParallelMeshDims(shard="z"), mp_policy=policy
    )
    for block in blocks:
        shard(block)
    if embedding is not None:
        # A lookup's gradient does not read the weight: no second gather.
        shard(embedding).set_unshard_in_backward(False)
    if head is not None:
        # Backward begins with the head: it stays gathered.
        shard(head, reshard_after_forward=False)
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            grid.collectives.take_over(module)


def _check_tied(model: nn.Module, groups: Sequence[nn.Module]) -> None:
    """FSDP2 keeps a weight tied only within one group: across two it would become two weights."""
    group_of = {module: i for i, group in enumerate(groups) for module in group.modules()}
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            group = group_of.get(module, -1)
            first = seen.setdefault(parameter, (group, f"{name}.{key}"))
            if first[0] != group:
                raise Refused(
                    f"{name}.{key} is tied to {first[1]}, in another of the {len(groups)} blocks whose weights are gathered "
                    "apart; untie them"
                )


@contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """Backward passes inside add to the gradients and send none of them over z and data.

    Run all micro-batches but the last inside, the last one outside: it sends the sum of all.

    Example:
        >>> with accumulating(model):
        ...     model(input_ids=ids[:1], labels=ids[:1], num_items_in_batch=items).loss.backward()
        >>> model(input_ids=ids[1:], labels=ids[1:], num_items_in_batch=items).loss.backward()
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not parallel; call parallelize(model, grid) first")
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
