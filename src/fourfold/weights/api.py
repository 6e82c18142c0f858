"""Weights on z and data: stored as shards over z, gathered where they are used, their gradients summed back.

Two back ends implement one small interface. `fsdp2` is PyTorch's own `fully_shard`: what a GPU gets by default.
`streamed` is Fourfold's own schedule on c10d's asynchronous collectives: it overlaps on any back end, Gloo included, where
FSDP2's collectives block because a CPU has no streams. A module that computes calls `read_weight` and knows of neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from fourfold.mesh.axes import Axis

Precision = Literal["fp32", "bf16"]
Weights = Literal["auto", "fsdp2", "streamed"]
# The gradients of several micro-batches: added up whole on each z rank and reduced once, or reduced over z in each of them.
Accumulation = Literal["whole", "sharded"]

_ATTRIBUTE = "_weight_backend"


class WeightBackend(Protocol):
    """How the parameters of a model are stored over z, read, and given their gradients."""

    @property
    def name(self) -> Literal["fsdp2", "streamed"]: ...

    def read(self, module: nn.Module, key: str, axes: tuple[Axis, ...], by_sibling: bool) -> Tensor:
        """This rank's block of a parameter, complete over z, for use now.

        Where other ranks use the same values for other tokens, heads or rows, each has a part of the gradient: the
        parts are summed over ``axes``. ``by_sibling``: another module reads it, whose output includes the module's own.
        """

    def call_graph(self, block: nn.Module, graph: Callable[[], Any]) -> Any:
        """Call the graph of a compiled block, which reads plain tensors: this rank's blocks of its weights."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients; they send none of them, or reduce them over z alone."""

    def reshard(self) -> None:
        """Free what a forward left gathered."""


def read_weight(
    module: nn.Module, key: str, axes: tuple[Axis, ...] = (), *, by_sibling: bool = False
) -> Tensor:
    """This rank's block of a module's parameter; see `WeightBackend.read`."""
    backend: WeightBackend = module.__dict__[_ATTRIBUTE]
    return backend.read(module, key, axes, by_sibling)


Place = tuple[dict[str, Any], str]  # the parameters of a module, and which one


@contextmanager
def holding(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, modules have these tensors instead of their parameters."""
    before = [parameters[key] for parameters, key in places]
    for (parameters, key), tensor in zip(places, tensors, strict=True):
        parameters[key] = tensor
    try:
        yield
    finally:
        for (parameters, key), parameter in zip(places, before, strict=True):
            parameters[key] = parameter


def set_backend(module: nn.Module, backend: WeightBackend) -> None:
    # Not a submodule, so that no tree of modules shows it.
    module.__dict__[_ATTRIBUTE] = backend


def backend_of(model: nn.Module) -> WeightBackend | None:
    """The back end of a parallel model; None if the model is not parallel."""
    return cast(WeightBackend | None, model.__dict__.get(_ATTRIBUTE))


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside add to the gradients, which are not complete until one outside has run.

    Run all micro-batches but the last inside, the last one outside: it sends the sum of all over z and data. With
    ``accumulation="sharded"`` each pass reduces its gradients over z, and the last one the sum over data. What was accumulated inside
    may not be in ``.grad`` yet, so that `zero_grad` does not drop it.

    Example:
        >>> with no_sync(model):
        ...     model(input_ids=ids[:1], labels=ids[:1], num_items_in_batch=items).loss.backward()
        >>> model(input_ids=ids[1:], labels=ids[1:], num_items_in_batch=items).loss.backward()
    """
    backend = backend_of(model)
    if backend is None:
        raise ValueError(f"{type(model).__name__} is not parallel; call parallelize(model, grid) first")
    with backend.no_sync():
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Forwards inside are not trained on: no dropout, nothing kept for backward, and the weights are shards afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if (backend := backend_of(model)) is not None:
            backend.reshard()
