"""Weights on (z, data): stored in parts over z, gathered for the work, their gradients summed back.

Two ways, behind one seam: `fsdp2`, PyTorch's own, and `streamed`, our own schedule (streamed.py). What computes asks
`local_weight` or `summed_weight` for its block and knows of neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fourfold.errors import UnsupportedError
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import GradientAxes, sum_backward
from fourfold.weights.overlap import Overlap
from fourfold.weights.streamed import StreamedWeights

Precision = Literal["fp32", "bf16"]
Weights = Literal["auto", "fsdp2", "streamed"]


def local_weight(module: nn.Module, key: str) -> Tensor:
    """This rank's block of a module's parameter, whole over z, for the work of this moment."""
    streamed = module.__dict__.get("_streamed")
    if streamed is not None:
        return cast(StreamedWeights, streamed).read(module, key)
    return cast(DTensor, module._parameters[key]).to_local()


def summed_weight(
    module: nn.Module, key: str, axes: GradientAxes, grid: Grid, name: str, *, by_sibling: bool = False
) -> Tensor:
    """The same, where other ranks use it for other tokens, heads or rows: their gradients are summed over ``axes``.

    ``by_sibling``: it is read for the module by another one whose output the module's is a part of.
    """
    streamed = module.__dict__.get("_streamed")
    if streamed is not None:
        return cast(StreamedWeights, streamed).read(module, key, by_sibling=by_sibling, axes=axes)
    block = local_weight(module, key)
    for axis in axes.parts:
        block = sum_backward(block, grid.collectives, axis, "replica", name)
    return block


def is_streamed(model: nn.Module) -> bool:
    return "_streamed" in model.__dict__


def choose_weights(weights: Weights, grid: Grid) -> tuple[Weights, str]:
    """Which way is taken, and why, in words."""
    if weights != "auto":
        return weights, "asked for"
    if grid.target == "cuda":
        return "fsdp2", "auto: proven on CUDA"
    return "streamed", f"auto: overlaps on {grid.target}, where FSDP2 has no streams to do so"


def shard_weights(
    model: nn.Module,
    grid: Grid,
    blocks: Sequence[nn.Module],
    precision: Precision,
    weights: Weights,
    overlap: Overlap,
    *,
    lanes: Callable[[], int],
    embedding: nn.Module | None = None,
    head: nn.Module | None = None,
) -> None:
    """Cut every parameter over z.

    Master weights and the reduction of gradients are fp32 in either precision; in bf16 the gathered weights, and so
    the work, are bf16. ``lanes`` says how many parts of the batch are in the model at this moment; ``embedding`` and
    ``head`` are those that are not tied.
    """
    if weights == "streamed":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model.__dict__["_streamed"] = StreamedWeights(model, grid, blocks, dtype, overlap, lanes)
    else:
        _fully_shard(model, grid, blocks, precision, embedding=embedding, head=head)


def _fully_shard(
    model: nn.Module,
    grid: Grid,
    blocks: Sequence[nn.Module],
    precision: Precision,
    *,
    embedding: nn.Module | None,
    head: nn.Module | None,
) -> None:
    """FSDP2 over z, a group for each block and one for what is left; the data axis is reduced behind it.

    ``embedding`` and ``head``, where they are not tied, are groups of their own.
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
                raise UnsupportedError(
                    f"{name}.{key} is tied to {first[1]}, in another of the {len(groups)} blocks whose weights are gathered "
                    "apart; untie them"
                )


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside add to the gradients and send none of them over z and data.

    Run all micro-batches but the last inside, the last one outside: it sends the sum of all. What was added up inside
    is not in ``.grad`` yet, so `zero_grad` does not drop it.

    Example:
        >>> with accumulating(model):
        ...     model(input_ids=ids[:1], labels=ids[:1], num_items_in_batch=items).loss.backward()
        >>> model(input_ids=ids[1:], labels=ids[1:], num_items_in_batch=items).loss.backward()
    """
    streamed = model.__dict__.get("_streamed")
    if streamed is not None:
        with cast(StreamedWeights, streamed).no_sync():
            yield
        return
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not parallel; call parallelize(model, grid) first")
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Forwards inside are not trained on: no dropout, nothing kept for backward, and the weights are shards afterwards.

    FSDP2 leaves the head and the root gathered after a forward that no backward follows. An optimizer made of the
    parameters that the model has then would train tensors that nobody reads.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
