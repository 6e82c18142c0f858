"""The head and the loss in one: chunk by chunk of the tokens, so that only a chunk of the logits exists at a time.

`model(input_ids, labels=labels).loss` of an unmodified model takes this way by itself. While the model has labels, its head
computes the loss of its output, and returns `LazyLogits` that hold it; the model's loss function takes it from there. Whoever
reads the logits gets them: then the head is called again. The gradients of the head and of its input are computed in forward,
with the logits, because they need nothing but the labels and the number of tokens; backward multiplies them by the gradient of
the loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Pending
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel.layers import check_range
from fourfold.parallel.linear import Linear4D
from fourfold.parallel.linear_op import Product
from fourfold.parallel.loss.chunk_size import chunk_tokens, gradient_rows
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

    def count(self, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int | None) -> Tensor:
        """The number of labels of the global batch."""


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
        self._mine.request, self._mine.inside = request, True
        if request is not None:
            self._mine.num_items = request.num_items
            if request.num_items is None:
                self._mine.num_items = self._targets.count(
                    request.labels, request.shift_labels, request.ignore_index
                )
        try:
            yield
        finally:
            self._mine.request, self._mine.inside = None, False

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
            self._mine.num_items,
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
        False,
        name,
    )


# -- the function -----------------------------------------------------------------------------------------------------


def chunked_cross_entropy(
    input: Tensor,
    weight: Tensor,
    targets: Tensor,
    product: Product,
    grid: Grid,
    vocab_size: int,
    ignore_index: int,
    num_items: int | Tensor,
) -> Tensor:
    """The mean cross entropy of the global batch from the input of the head; ``targets`` are those of all tokens."""
    targets = targets.reshape(-1).to(input.device)
    check_range(targets, vocab_size, "a label", ignore_index)
    is_split = product.leaves[0] == "tokens" and product.in_ranks > 1
    wants = (
        torch.is_grad_enabled() and input.requires_grad,
        torch.is_grad_enabled() and weight.requires_grad,
    )
    columns = (
        chunk(vocab_size, grid.x, grid.coordinate("x")) if product.out_axis == "x" else slice(0, vocab_size)
    )
    assert weight.shape[1 if product.transposed else 0] == columns.stop - columns.start
    # In the gradients of the logits, in fp32: most often backward then multiplies by 1.
    share = 1.0 / torch.as_tensor(num_items, device=input.device, dtype=torch.float32)
    arguments = (input, weight, targets, product, grid, columns.start, vocab_size, ignore_index, share, wants)
    loss = cast(Tensor, _ChunkedLoss.apply(*arguments))  # type: ignore[no-untyped-call]
    # As in `cross_entropy`: each rank has the loss of its own tokens.
    axes: tuple[Axis, ...] = ("y", "z", "data") if is_split else ("z", "data")
    for axis in axes:
        loss = sum_forward(loss, grid.collectives, axis, "loss", product.name)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """The sum over this rank's tokens of -log p(label) times ``share``, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        targets: Tensor,
        product: Product,
        grid: Grid,
        first: int,
        vocabulary: int,
        ignore_index: int,
        share: Tensor,
        wants: tuple[bool, bool],
    ) -> Tensor:
        wants_input, wants_weight = wants
        own = input.reshape(-1, input.shape[-1])
        gathered, pending = product.gather(own, product.out_axis, product.enter, "activation")
        _wait(product, pending)
        (full,) = gathered
        block = weight.t() if product.transposed else weight
        leave = product.leaves[0]
        groups = product.in_ranks if leave == "tokens" else 1
        # [groups, tokens of a group, features]: a rank of in_axis keeps the logits of one group.
        tokens, labels = full.unflatten(0, (groups, -1)), targets.view(groups, -1)
        mine = grid.coordinate(product.in_axis) if groups > 1 else 0
        size = max(1, chunk_tokens(vocabulary, grid.size(product.out_axis)) // groups)
        total = torch.zeros((), device=input.device)
        input_gradient = torch.empty_like(tokens) if wants_input else None
        of_weight = _WeightGradient(block) if wants_weight else None
        for begin in range(0, tokens.shape[1], size):
            part = tokens[:, begin : begin + size].flatten(0, 1)
            logits = torch.mm(part, block.t())
            if groups > 1:
                kept = logits.new_empty(logits.shape[0] // groups, logits.shape[1])
                _wait(product, product.reduce(kept, logits, product.in_axis, leave))
                logits = kept
                del kept
            elif product.in_ranks > 1:
                _wait(product, product.reduce(logits, logits, product.in_axis, leave))
            label = labels[mine, begin : begin + size]
            loss, gradient = _token_losses(logits, label, first, ignore_index, share, product, any(wants))
            total += loss
            if gradient is None:
                continue
            del logits
            if groups > 1:
                whole = gradient.new_empty(gradient.shape[0] * groups, gradient.shape[1])
                axis = cast(Axis, product.in_axis)
                _wait(
                    product,
                    product.collectives.all_gather(whole, gradient, axis, "activation", module=product.name),
                )
                gradient = whole
                del whole
            is_last = begin + size >= tokens.shape[1]
            if input_gradient is not None:
                input_gradient[:, begin : begin + size] = torch.mm(gradient, block).unflatten(0, (groups, -1))
                if is_last:  # in flight while the last part of the head's gradient is computed
                    scattered, pending = _start_to_reduce(product, input_gradient.view_as(gathered), own)
            if of_weight is not None:
                of_weight.add(gradient, part, is_only=begin == 0 and is_last)
            del gradient  # not to be there with the next logits
        weight_gradient = of_weight.total() if of_weight is not None else None
        if weight_gradient is not None and product.transposed:
            weight_gradient = weight_gradient.t()
        if input_gradient is not None:
            _wait(product, pending)
            input_gradient = scattered.view(input.shape)
        ctx.save_for_backward(input_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if saved is None else saved * gradients[0] for saved in ctx.saved_tensors]
        return (*found, None, None, None, None, None, None, None, None)


class _WeightGradient:
    """The gradient of the head, [vocabulary, features]: of several chunks of tokens summed in fp32, whatever the dtype of the weight.

    By parts of the vocabulary, so that the product of one chunk, and the result in the dtype of the weight, need little memory in addition.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._rows = gradient_rows(weight.shape[1])
        self._whole: Tensor | None = None
        self._parts: list[Tensor] = []

    def add(self, gradient: Tensor, tokens: Tensor, *, is_only: bool) -> None:
        """What the gradient of the logits of some tokens adds; ``is_only``: of all tokens."""
        if is_only:
            self._whole = torch.mm(gradient.t(), tokens)
            return
        is_first = not self._parts
        if is_first:
            if self._weight.dtype == torch.float32:  # then the parts are the result
                self._whole = torch.empty(self._weight.shape, device=gradient.device)
                self._parts = list(self._whole.split(self._rows))
            else:
                sizes = [len(part) for part in self._weight.split(self._rows)]
                features = self._weight.shape[1]
                self._parts = [torch.empty(size, features, device=gradient.device) for size in sizes]
        for total, columns in zip(self._parts, gradient.split(self._rows, dim=1), strict=True):
            step = torch.mm(columns.t(), tokens)
            if is_first:
                total.copy_(step)
            else:
                total += step

    def total(self) -> Tensor | None:
        """In the dtype of the weight; None if there were no tokens."""
        if self._whole is None and self._parts:
            narrow = []
            while self._parts:  # each is freed before the next is copied
                narrow.append(self._parts.pop(0).to(self._weight.dtype))
            self._whole = torch.cat(narrow)
        return self._whole


def _start_to_reduce(product: Product, parts: Tensor, own: Tensor) -> tuple[Tensor, Pending]:
    """The sum over out_axis of the gradient of the input: of this rank's tokens, or of all."""
    is_cut = product.enter == "tokens" and product.out_ranks > 1
    scattered = torch.empty_like(own) if is_cut else parts
    return scattered, product.reduce(scattered, parts, product.out_axis, product.enter)


def _wait(product: Product, pending: Pending) -> None:
    interleaving = product.collectives.interleaving
    if interleaving is not None:
        interleaving.switch()  # the other half-batch runs meanwhile
    pending.wait()


def _token_losses(
    logits: Tensor,
    labels: Tensor,
    first: int,
    ignore_index: int,
    share: Tensor,
    product: Product,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """(the sum of the losses of these tokens, the gradient of the logits in their dtype), in fp32 in between."""
    # In place also if the logits are in fp32 themselves: nobody reads them any more.
    found = softmax_over_ranks(
        logits.float(),
        labels,
        first,
        ignore_index,
        product.collectives,
        product.out_axis,
        product.name,
        in_place=True,
    )
    loss = torch.where(found.counted, found.log_z - found.label_logit, 0.0).sum() * share
    if not wants_gradient:
        return loss, None
    wide = found.exponentials.div_(found.total.unsqueeze(-1))
    found.subtract_labels(wide)
    wide.mul_((found.counted * share).unsqueeze(-1))
    return loss, wide.to(logits.dtype)


class Softmax(NamedTuple):
    """Of the tokens' logits, whose columns are sharded over an axis; all but the exponentials are the same on its ranks."""

    exponentials: Tensor  # of this rank's columns, less the highest logit of the token
    total: Tensor  # of the exponentials of all columns
    log_z: Tensor
    label_logit: Tensor
    counted: Tensor
    column: Tensor  # the label's column on this rank, where it is one
    here: Tensor

    def subtract_labels(self, gradient: Tensor) -> None:
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, self.column, -self.here.to(gradient.dtype).unsqueeze(-1))


def softmax_over_ranks(
    wide: Tensor,
    labels: Tensor,
    first: int | Tensor,
    ignore_index: int,
    collectives: Collectives,
    axis: Axis | None,
    module: str = "",
    *,
    in_place: bool = False,
) -> Softmax:
    """``first`` is the first column of the vocabulary on this rank; ``in_place`` overwrites the logits."""
    width = wide.shape[-1]
    local = labels - first
    counted = labels != ignore_index
    here = (local >= 0) & (local < width) & counted
    column = local.clamp(0, max(0, width - 1)).unsqueeze(-1)
    # A rank may have no columns, if the vocabulary is smaller than x.
    highest = wide.amax(-1) if width else wide.new_full(labels.shape, float("-inf"))
    collectives.all_reduce(highest, axis, "loss", dist.ReduceOp.MAX, module=module).wait()
    sums = wide.new_zeros(2, *labels.shape)
    if width:
        sums[1] = torch.where(here, wide.gather(-1, column).squeeze(-1), 0.0)
    wide = torch.sub(wide, highest.unsqueeze(-1), out=wide if in_place else None).exp_()
    if width:
        torch.sum(wide, -1, out=sums[0])
    collectives.all_reduce(sums, axis, "loss", module=module).wait()
    total, label_logit = sums
    return Softmax(wide, total, highest + total.log(), label_logit, counted, column, here)
