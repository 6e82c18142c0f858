"""How an unmodified model takes the chunked loss: `model(input_ids, labels=labels).loss`.

While the model has labels, its head computes the loss of its output, and returns `LazyLogits` that hold it; the model's loss
function takes it from there. Whoever reads the logits gets them: then the head is called again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from fourfold.mesh.grid import Grid
from fourfold.parallel.linear import Linear4D
from fourfold.parallel.loss.chunked import chunked_cross_entropy
from fourfold.parallel.product.product import Product
from fourfold.weights.overlap import Overlap

IGNORE_INDEX = -100

# -- the logits that a model returns ----------------------------------------------------------------------------------

_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.element_size,
    Tensor.stride,
}


class LazyLogits(Tensor):
    """Logits that are computed when something reads them. ``loss`` is the loss of ``request``, if it was computed without."""

    # For those who free the head's weight until backward: it is not read there.
    gradient_is_known = True
    loss: Tensor | None
    request: Request | None
    _compute: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        like: Tensor,
        compute: Callable[[], Tensor],
        loss: Tensor | None = None,
        request: Request | None = None,
    ) -> LazyLogits:
        lazy = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)
        lazy.loss, lazy.request, lazy._compute, lazy._made = loss, request, compute, None
        return lazy

    def values(self) -> Tensor:
        if self._made is None:
            self._made = self._compute()
        return self._made

    @staticmethod
    def joined(parts: Sequence[LazyLogits]) -> LazyLogits:
        """The rows of several half-batches, one after another."""
        rows = sum(part.shape[0] for part in parts)
        return LazyLogits(
            (rows, *parts[0].shape[1:]), parts[0], lambda: torch.cat([part.values() for part in parts])
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA or getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyLogits({tuple(self.shape)}, {self.dtype})"


# -- what a forward asks for ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of a forward that say which loss it wants."""

    labels: Tensor | None
    shift_labels: Tensor | None
    num_items: int | Tensor | None
    ignore_index: int

    @staticmethod
    def of(given: dict[str, Any]) -> Request | None:
        labels, shift_labels = given.get("labels"), given.get("shift_labels")
        if not isinstance(labels, Tensor) and not isinstance(shift_labels, Tensor):
            return None
        ignore_index = given.get("ignore_index")
        return Request(
            labels,
            shift_labels,
            given.get("num_items_in_batch"),
            IGNORE_INDEX if ignore_index is None else ignore_index,
        )

    def is_for(
        self,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items: int | Tensor | None,
        ignore_index: int,
    ) -> bool:
        """Does the model's loss function ask for the same?"""
        return (
            (shift_labels is self.shift_labels if shift_labels is not None else labels is self.labels)
            and num_items is self.num_items
            and ignore_index == self.ignore_index
        )


class Targets(Protocol):
    """What the model's loss function does with labels."""

    def targets(self, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
        """What each position should predict."""

    def count(
        self, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int | None
    ) -> Callable[[], Tensor]:
        """The number of labels of the global batch: starts to count, and waits for it when it is called."""


class HeadLoss:
    """Lets a head compute the loss while the model has labels."""

    def __init__(self, grid: Grid, targets: Targets, vocab_size: int) -> None:
        self._grid, self._targets, self._vocabulary = grid, targets, vocab_size
        self._mine = threading.local()  # half-batches run in threads
        # Until the model does something to its logits before the loss, and needs them.
        self._is_direct = True
        self._is_read_in_backward = False

    @contextmanager
    def expecting(self, given: dict[str, Any]) -> Iterator[None]:
        """A forward with these arguments."""
        request = Request.of(given) if self._is_direct else None
        self._mine.request, self._mine.inside, self._mine.count = request, True, None
        if request is not None and request.num_items is None:
            # Of a few bytes, but after the gathers of the first weights: only the loss waits for it.
            self._mine.count = self._targets.count(request.labels, request.shift_labels, request.ignore_index)
        try:
            yield
            if self._mine.count is not None:
                self._mine.count()  # nothing stays in flight where the model did not call its head
        finally:
            self._mine.request, self._mine.inside, self._mine.count = None, False, None

    def take_over(self, head: nn.Module, name: str) -> bool:
        """Replace the head's forward, if it is a plain product."""
        if isinstance(head, Linear4D):
            if head.has_bias or head.weight_count != 1:
                return False
        elif not isinstance(head, nn.Linear) or head.bias is not None:
            return False
        inner = head.forward

        def forward(input: Tensor) -> Tensor:
            request = getattr(self._mine, "request", None)
            if request is None:
                self._read_in_backward(head)
                return inner(input)
            return self._lazy(head, name, inner, input, request)

        head.forward = forward  # type: ignore[method-assign]
        return True

    def _read_in_backward(self, head: nn.Module) -> None:
        """The backward of plain logits reads the weight: from now on FSDP2 gathers it there."""
        if not self._is_read_in_backward and torch.is_grad_enabled():
            self._is_read_in_backward = True
            if isinstance(head, FSDPModule):
                head.set_unshard_in_backward(True)

    def _lazy(
        self, head: nn.Module, name: str, inner: Callable[[Tensor], Tensor], input: Tensor, request: Request
    ) -> Tensor:
        targets = self._targets.targets(request.labels, request.shift_labels, request.ignore_index)
        if isinstance(head, Linear4D):
            own, product, (weight,) = head.group.operands(input, [head])
            lead = head.group.output_shape(own, head, product)
        else:
            assert isinstance(head, nn.Linear)
            own, weight = input, head.weight
            product = _stock_product(self._grid, name)
            lead = tuple(input.shape[:-1])
        rows = own.shape[:-1].numel() * (product.out_ranks if product.enter == "tokens" else 1)
        if rows != targets.numel():  # some positions alone: the stock loss says what is wrong with that
            self._read_in_backward(head)
            return inner(input)
        loss = chunked_cross_entropy(
            own,
            weight,
            targets,
            product,
            self._grid,
            self._vocabulary,
            request.ignore_index,
            self._mine.count() if request.num_items is None else request.num_items,
        )
        width = weight.shape[1 if product.transposed else 0]
        shape = (*lead, width) if -1 not in lead else (*lead[:-1], _rows_kept(rows, product), width)

        tokens = head.group.tokens if isinstance(head, Linear4D) else None
        batch = tokens.shape if tokens is not None else None

        def compute() -> Tensor:
            if getattr(self._mine, "inside", False):
                self._is_direct = False
            before, self._mine.request = getattr(self._mine, "request", None), None
            try:
                with tokens.using(batch) if tokens is not None else nullcontext():
                    return cast(Tensor, head(input))
            finally:
                self._mine.request = before

        return LazyLogits(shape, own, compute, loss, request)


def _rows_kept(rows: int, product: Product) -> int:
    return rows // product.in_ranks if product.leaves[0] == "tokens" else rows


def _stock_product(grid: Grid, name: str) -> Product:
    """That of a head that is not sharded."""
    return Product(
        grid.collectives,
        None,
        None,
        "whole",
        ("whole",),
        (slice(0, 1),),
        False,
        Overlap(),
        grid.target,
        defers=False,
        float8=False,
        name=name,
    )
