"""The head and the loss in one: chunk by chunk of the tokens, so that only a chunk of the logits exists at a time.

The gradients of the head and of its input are computed in forward, with the logits, because they need nothing but the labels
and the number of tokens; backward multiplies them by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Collectives, Pending
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel.layers import check_range
from fourfold.parallel.loss.chunk_size import chunk_tokens, gradient_rows, piece_tokens
from fourfold.parallel.product.product import Product


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


def chunk_starts(tokens: int, size: int) -> Iterable[int]:
    """A dry run has fewer (`dry_run/loss_chunks.py`)."""
    return range(0, tokens, size)


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
        collectives = product.collectives
        own = input.reshape(-1, input.shape[-1])
        gathered, pending = product.gather(own, product.out_axis, product.enter, "activation")
        collectives.wait(pending, in_turns=True)
        (full,) = gathered
        block = weight.t() if product.transposed else weight
        leave = product.leaves[0]
        groups = product.in_ranks if leave == "tokens" else 1
        # [groups, tokens of a group, features]: a rank of in_axis keeps the logits of one group.
        tokens, labels = full.unflatten(0, (groups, -1)), targets.view(groups, -1)
        mine = grid.coordinate(product.in_axis) if groups > 1 else 0
        size = chunk_tokens(vocabulary, grid.size(product.out_axis), full.element_size()) // groups
        size = max(1, size)
        piece = piece_tokens(
            -(-vocabulary // grid.size(product.out_axis))
        )  # equal on all ranks, as the chunk
        total = torch.zeros((), device=input.device)
        input_gradient = torch.empty_like(tokens) if wants_input else None
        of_weight = _WeightGradient(block) if wants_weight else None
        for begin in chunk_starts(tokens.shape[1], size):
            part = tokens[:, begin : begin + size].flatten(0, 1)
            logits = torch.mm(part, block.t())
            if groups > 1:
                kept = logits.new_empty(logits.shape[0] // groups, logits.shape[1])
                collectives.wait(product.reduce(kept, logits, product.in_axis, leave), in_turns=True)
                logits = kept
                del kept
            elif product.in_ranks > 1:
                collectives.wait(product.reduce(logits, logits, product.in_axis, leave), in_turns=True)
            label = labels[mine, begin : begin + size]
            total += _token_losses(logits, label, first, ignore_index, share, product, piece, any(wants))
            if not any(wants):
                continue
            gradient = logits
            del logits
            if groups > 1:
                whole = gradient.new_empty(gradient.shape[0] * groups, gradient.shape[1])
                axis = cast(Axis, product.in_axis)
                gathered_again = collectives.all_gather(
                    whole, gradient, axis, "activation", module=product.name
                )
                collectives.wait(gathered_again, in_turns=True)
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
            collectives.wait(pending, in_turns=True)
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


def _token_losses(
    logits: Tensor,
    labels: Tensor,
    first: int,
    ignore_index: int,
    share: Tensor,
    product: Product,
    size: int,
    wants_gradient: bool,
) -> Tensor:
    """The sum of the losses of these tokens. Writes the gradients of the logits over them.

    By pieces of ``size`` tokens, because what is in between is in fp32.
    """
    total = torch.zeros((), device=logits.device)
    for piece, label in zip(logits.split(size), labels.split(size), strict=True):
        found = softmax_over_ranks(
            piece,
            label,
            first,
            ignore_index,
            product.collectives,
            product.out_axis,
            product.name,
            out=piece if piece.dtype == torch.float32 else None,
        )
        total += torch.where(found.counted, found.log_z - found.label_logit, 0.0).sum()
        if wants_gradient:
            # (exponential - total at the label) * share / total
            found.subtract_at_labels(found.exponentials, found.total)
            factor = found.counted * share / found.total
            torch.mul(found.exponentials, factor.unsqueeze(-1), out=piece)
        del found  # not to be there with the next piece
    return total * share


class Softmax(NamedTuple):
    """Of the tokens' logits, whose columns are sharded over an axis; all but the exponentials are the same on its ranks."""

    exponentials: Tensor  # of this rank's columns, less the highest logit of the token
    total: Tensor  # of the exponentials of all columns
    log_z: Tensor
    label_logit: Tensor
    counted: Tensor
    column: Tensor  # the label's column on this rank, where it is one
    here: Tensor

    def subtract_at_labels(self, of: Tensor, amount: Tensor | float) -> None:
        """``amount`` of each token, from the column of its label."""
        if of.shape[-1]:
            of.scatter_add_(-1, self.column, -(self.here.to(of.dtype) * amount).unsqueeze(-1))


def softmax_over_ranks(
    logits: Tensor,
    labels: Tensor,
    first: int | Tensor,
    ignore_index: int,
    collectives: Collectives,
    axis: Axis | None,
    module: str = "",
    *,
    out: Tensor | None = None,
) -> Softmax:
    """In fp32. ``first`` is the first column of the vocabulary on this rank; the exponentials may be written over logits in fp32."""
    width = logits.shape[-1]
    local = labels - first
    counted = labels != ignore_index
    here = (local >= 0) & (local < width) & counted
    column = local.clamp(0, max(0, width - 1)).unsqueeze(-1)
    # A rank may have no columns, if the vocabulary is smaller than x.
    highest = logits.amax(-1).float() if width else torch.full(labels.shape, -torch.inf, device=logits.device)
    collectives.all_reduce(highest, axis, "loss", dist.ReduceOp.MAX, module=module).wait()
    sums = highest.new_zeros(2, *labels.shape)
    if width:
        sums[1] = torch.where(here, logits.gather(-1, column).squeeze(-1), 0.0)
    exponentials = torch.sub(logits, highest.unsqueeze(-1), out=out).exp_()
    if width:
        torch.sum(exponentials, -1, out=sums[0])
    collectives.all_reduce(sums, axis, "loss", module=module).wait()
    total, label_logit = sums
    return Softmax(exponentials, total, highest + total.log(), label_logit, counted, column, here)
