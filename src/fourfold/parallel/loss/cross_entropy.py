"""Cross entropy with logits sharded over x by vocabulary, averaged over the tokens of the global batch.

Only per-token values are sent over x: first the maximum, then the sum of exponentials and the label's logit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fourfold.errors import UnsupportedError
from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.axes import Axis
from fourfold.mesh.collectives import Pending
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel.layers import check_range
from fourfold.parallel.loss.chunked import softmax_over_ranks
from fourfold.parallel.loss.head import IGNORE_INDEX, HeadLoss, LazyLogits

_BATCH_AXES: tuple[Axis, ...] = ("z", "data")


class _TokenLoss(torch.autograd.Function):
    """-log p(label) + z_loss * log(Z)^2 of each token, in fp32 for any dtype of the logits; 0 where there is no label.

    The logits are saved in their own dtype and their exponentials are recomputed in backward, because an fp32 copy of
    such a large tensor would cost too much memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first: int | Tensor,
        ignore_index: int,
        z_loss: float,
        grid: Grid,
    ) -> Tensor:
        found = softmax_over_ranks(logits, labels, first, ignore_index, grid.collectives, "x")
        ctx.save_for_backward(logits)
        # The exponentials are not kept.
        ctx.softmax, ctx.z_loss = found._replace(exponentials=found.total), z_loss
        token_loss = found.log_z - found.label_logit + z_loss * found.log_z.square()
        return torch.where(found.counted, token_loss, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits,), softmax = ctx.saved_tensors, ctx.softmax
        gradient = torch.sub(logits, softmax.log_z.unsqueeze(-1)).exp_()
        gradient *= (1.0 + 2.0 * ctx.z_loss * softmax.log_z).unsqueeze(-1)
        softmax.subtract_at_labels(gradient, 1.0)
        gradient *= torch.where(softmax.counted, gradients[0], 0.0).unsqueeze(-1)
        return gradient.to(logits.dtype), None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    grid: Grid,
    *,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
) -> Tensor:
    """The mean cross entropy of the global batch, equal on every rank.

    ``logits`` are this rank's columns of the vocabulary (``model(ids).logits``). ``labels`` say what each position should
    predict; they are not shifted here. The mean is over the labels of the global batch that are not ``ignore_index``,
    also if ranks have different numbers of them. With sequence-parallel activations a y rank has the logits of 1/y of the
    tokens; pass the labels of all tokens. To accumulate gradients over several calls, pass the number of counted labels
    of all calls as ``num_items`` (`count_labels`), so that the accumulated gradient is that of one mean. With
    ``vocab_size`` the width of the logits is checked against it; without, the ranks exchange their widths.

    Example:
        >>> labels = torch.full_like(ids, IGNORE_INDEX)
        >>> labels[:, :-1] = ids[:, 1:]  # each position predicts the next token
        >>> loss = cross_entropy(model(input_ids=ids).logits, labels, grid)
        >>> loss.backward()
    """
    if num_items is None:
        num_items = count_labels(labels, grid, ignore_index=ignore_index)
    of_tokens, is_sequence_parallel = _token_losses(
        logits, labels, grid, vocab_size, ignore_index, softcap, z_loss
    )
    loss = of_tokens.sum() / num_items
    # Each rank's backward covers its own tokens; the gradients of weights are summed over z and data later.
    axes: tuple[Axis, ...] = ("y", "z", "data") if is_sequence_parallel else ("z", "data")
    for axis in axes:
        loss = sum_forward(loss, grid.collectives, axis, "loss")
    return loss


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    grid: Grid,
    *,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
) -> Tensor:
    """The log-probability of each label, in fp32, in the shape of ``labels``; 0 where a label is ``ignore_index``.

    For losses of your own, as DPO or GRPO have: only a few numbers for each token are sent, and x and y neighbours have the same result.
    ``labels`` say what each position should predict. Gradients are summed over z and data: divide the loss of this rank's rows by the number
    of rows of the global batch.

    Example:
        >>> labels = torch.full_like(ids, IGNORE_INDEX)
        >>> labels[:, :-1] = ids[:, 1:]
        >>> of_rows = token_log_probs(model(input_ids=ids).logits, labels, grid).sum(-1)
        >>> of_rows.shape
        torch.Size([2])
    """
    of_tokens, _ = _token_losses(logits, labels, grid, vocab_size, ignore_index, softcap, 0.0)
    return tokens_of_all(-of_tokens, labels, grid)


def tokens_of_all(of_tokens: Tensor, labels: Tensor, grid: Grid) -> Tensor:
    """A number for each of this rank's tokens becomes one for each label, on all y ranks."""
    if of_tokens.numel() == labels.numel():
        return of_tokens
    # Its own tokens of each row; the sum with zeros puts those of all y ranks together.
    parts = of_tokens.new_zeros(of_tokens.shape[0], grid.y, of_tokens.shape[1])
    placed = parts.index_copy(
        1, torch.tensor([grid.coordinate("y")], device=parts.device), of_tokens[:, None]
    )
    return sum_forward(placed, grid.collectives, "y", "loss").reshape(labels.shape)


def _token_losses(
    logits: Tensor,
    labels: Tensor,
    grid: Grid,
    vocab_size: int | None,
    ignore_index: int,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, bool]:
    """(-log p of the labels of this rank's tokens, whether these are a part of the tokens)."""
    all_labels, labels = labels, own_labels(logits, labels, grid)
    if logits.shape[:-1] != labels.shape:
        part = f", which may be those of 1/{grid.y} of the tokens" if grid.y > 1 else ""
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not match logits of shape {tuple(logits.shape)}{part}: pass one label for "
            "each position of the batch"
        )
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    first, vocabulary = own_columns(logits, grid, vocab_size)
    # Checked on all labels, so that every rank raises: if only one did, the others would wait for it.
    check_range(all_labels.to(logits.device), vocabulary, "a label", ignore_index)
    arguments = (logits, labels.to(logits.device), first, ignore_index, z_loss, grid)
    return cast(Tensor, _TokenLoss.apply(*arguments)), labels is not all_labels  # type: ignore[no-untyped-call]


def own_labels(logits: Tensor, labels: Tensor, grid: Grid) -> Tensor:
    """The labels of the logits' tokens; with sequence-parallel activations a y rank has 1/y of them, in order."""
    rows = logits.shape[:-1]
    if grid.y == 1 or len(rows) != 2 or labels.numel() != grid.y * rows.numel():
        return labels
    # Each half-batch is sharded separately, so its tokens are split over y within the half.
    return labels.reshape(rows[0], grid.y, rows[1])[:, grid.coordinate("y")].contiguous()


def own_columns(logits: Tensor, grid: Grid, vocab_size: int | None) -> tuple[int | Tensor, int | Tensor]:
    """The first column of the vocabulary on this rank, and the number of columns on all ranks."""
    if vocab_size is None:
        widths = _widths(logits, grid)
        return widths[: grid.coordinate("x")].sum(), widths.sum()
    columns = chunk(vocab_size, grid.x, grid.coordinate("x"))
    if logits.shape[-1] != columns.stop - columns.start:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, but a vocabulary of {vocab_size} over x={grid.x} gives this rank "
            f"{columns.stop - columns.start}; pass the logits as the model returned them (not gathered), and its vocab_size"
        )
    return columns.start, vocab_size


def _widths(logits: Tensor, grid: Grid) -> Tensor:
    """The number of columns of each x rank; on the device, so that the host does not wait."""
    own = torch.full((1,), logits.shape[-1], device=logits.device)
    widths = own.new_empty(grid.x)
    grid.collectives.all_gather(widths, own, "x", "loss").wait()
    return widths


def count_labels(
    labels: Tensor, grid: Grid, *, shift: bool = False, ignore_index: int = IGNORE_INDEX, at_least: int = 1
) -> Tensor:
    """The number of labels of the global batch that count, equal on every rank; at least 1, so that a mean is defined.

    ``labels`` are those of this rank's rows. With ``shift`` they are in the form that a Hugging Face causal LM takes: the
    first label of each row does not count, because no position predicts it.

    Example:
        >>> int(count_labels(torch.tensor([5, 6, IGNORE_INDEX]), grid))
        2
    """
    return LabelCount(labels, grid, shift=shift, ignore_index=ignore_index, at_least=at_least)()


class LabelCount:
    """`count_labels`, whose first sum over ranks is in flight until the count is asked for."""

    def __init__(
        self, labels: Tensor, grid: Grid, *, shift: bool, ignore_index: int, at_least: int = 1
    ) -> None:
        self._sum = ((labels[..., 1:] if shift else labels) != ignore_index).sum().to(grid.device)
        self._grid, self._at_least = grid, at_least
        self._axes: list[Axis] = [axis for axis in _BATCH_AXES if grid.size(axis) > 1]
        self._first = self._start(self._axes.pop(0)) if self._axes else None
        self._made: Tensor | None = None

    def _start(self, axis: Axis) -> Pending:
        return self._grid.collectives.all_reduce(self._sum, axis, "loss")

    def __call__(self) -> Tensor:
        if self._made is None:
            if self._first is not None:
                self._first.wait()
            for axis in self._axes:
                self._start(axis).wait()
            self._made = self._sum.clamp(min=self._at_least)
        return self._made


class LossGuard:
    """Hugging Face's ``loss_function`` for sharded logits: ``model(input_ids, labels=labels).loss`` stays exact.

    A loss that the model computes in another way would use a part of the vocabulary or of the batch; `check` rejects it.
    """

    def __init__(self, model: str, grid: Grid, vocab_size: int | None, stock: str) -> None:
        self._model, self._grid, self._vocab_size, self._stock = model, grid, vocab_size, stock
        # By thread, because two half-batches may be in the model at the same time.
        self._computed: dict[int, tuple[Tensor, int]] = {}

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:
        if not self.is_known:
            raise UnsupportedError(
                f"{self._model} has the loss {self._stock}, which is unsupported for a batch sharded over data*z="
                f"{self._grid.token_ranks} and a vocabulary sharded over x={self._grid.x}; omit the labels and compute "
                "the loss from the logits (ff.cross_entropy)"
            )
        if isinstance(logits, LazyLogits):
            request, loss = logits.request, logits.loss
            if request is not None and request.is_for(labels, shift_labels, num_items_in_batch, ignore_index):
                assert loss is not None
                self._computed[threading.get_ident()] = (loss, _version(loss))
                return loss
            logits = logits.values()
        targets = self.targets(labels, shift_labels, ignore_index)
        # A flat list of labels also has one for each position.
        if targets.numel() == logits.shape[:-1].numel():
            targets = targets.reshape(logits.shape[:-1]).contiguous()
        loss = cross_entropy(
            logits,
            targets,
            self._grid,
            vocab_size=self._vocab_size,
            ignore_index=ignore_index,
            num_items=num_items_in_batch,
        )
        self._computed[threading.get_ident()] = (loss, _version(loss))
        return loss

    def targets(self, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
        """What each position should predict."""
        if shift_labels is not None:
            return shift_labels
        assert labels is not None
        if self._grid.sequence_ranks > 1 and self.shifts:
            raise UnsupportedError(
                f"{self._model} does not pass shift_labels to its loss, and labels of a part of a sequence cannot be shifted; use "
                f"sequence_ranks=1 instead of {self._grid.sequence_ranks}"
            )
        if self.shifts:
            return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return labels

    @property
    def shifts(self) -> bool:
        """Does a position predict the next token, not its own?"""
        return self._stock == "ForCausalLMLoss"

    @property
    def is_known(self) -> bool:
        """Is the model's loss one that can be computed from a part of the logits?"""
        return self._stock in ("ForCausalLMLoss", "ForMaskedLMLoss")

    def count(
        self, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int | None
    ) -> LabelCount:
        """The number of labels of the global batch that this loss is averaged over."""
        ignore_index = IGNORE_INDEX if ignore_index is None else ignore_index
        shift = shift_labels is None and self.shifts
        given = labels if shift_labels is None else shift_labels
        assert given is not None
        return LabelCount(given, self._grid, shift=shift, ignore_index=ignore_index)

    def expect(self) -> None:
        """Start a forward: forget the loss of an earlier one."""
        self._computed.pop(threading.get_ident(), None)

    def check(self, output: Any) -> None:
        """End a forward: if it returned a loss, this has to be the one computed here, unchanged."""
        loss = loss_of(output)
        if loss is None:
            return
        computed = self._computed.pop(threading.get_ident(), None)
        if computed is None or computed[0] is not loss or computed[1] != _version(loss):
            raise UnsupportedError(
                f"{self._model} computes its own loss, or adds to it (such as a router's auxiliary loss), which would be "
                f"the loss of one rank's part of data*z={self._grid.token_ranks}, x={self._grid.x}; omit the labels and "
                "compute the loss from the logits (ff.cross_entropy), or turn the additional loss off"
            )


def loss_of(output: Any) -> Tensor | None:
    """The loss in a model's output, if there is one."""
    loss = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.ndim == 0 else None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def guard_loss(model: torch.nn.Module, grid: Grid, vocab_size: int | None) -> LossGuard | None:
    """Replace the model's loss function by the exact one; None if neither the batch nor the model is sharded."""
    if grid.token_ranks * grid.x * grid.y == 1:
        return None
    stock: Any = getattr(model, "loss_function", None)
    guard = LossGuard(
        type(model).__name__, grid, vocab_size, getattr(stock, "__name__", type(stock).__name__)
    )
    if stock is not None:
        model.loss_function = guard  # type: ignore[assignment]  # Hugging Face has a setter for it
    return guard


def chunk_loss(model: torch.nn.Module, grid: Grid, guard: LossGuard | None) -> HeadLoss | None:
    """Let the model's head compute its loss by chunks of tokens; None where it cannot."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    config: Any = getattr(model, "config", None)
    if guard is None or not guard.is_known or head is None or not hasattr(config, "get_text_config"):
        return None
    head_loss = HeadLoss(grid, guard, int(config.get_text_config().vocab_size))
    name = next(name for name, module in model.named_modules() if module is head)
    return head_loss if head_loss.take_over(head, name) else None


def full_logits(
    logits: Tensor, grid: Grid, *, vocab_size: int | None = None, batch: Sequence[int] | None = None
) -> Tensor:
    """All columns of the vocabulary on every x rank, for evaluation; gradients do not flow through.

    With sequence-parallel activations a y rank has 1/y of the tokens; so with y > 1 pass the ``batch`` shape, (sequences, length).

    Example:
        >>> full_logits(model(input_ids=ids).logits, grid, vocab_size=131, batch=ids.shape).shape[-1]
        131
    """
    if grid.y > 1 and batch is None:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} on y={grid.y} ranks may be those of a part of the tokens; pass "
            "batch=ids.shape, with the ids that this rank passed to the model"
        )
    vocabulary = vocab_size or int(_widths(logits, grid).sum())
    widest = chunk(vocabulary, grid.x, 0).stop
    padded = logits.new_zeros(*logits.shape[:-1], widest)
    padded[..., : logits.shape[-1]] = logits.detach()
    gathered = padded.new_empty(grid.x, *padded.shape)
    grid.collectives.all_gather(gathered, padded, "x", "logits").wait()
    own = torch.cat(gathered.unbind(0), dim=-1)[..., :vocabulary]
    if batch is None or own.shape[:-1] == tuple(batch):
        return own
    if own.ndim != 3 or own.shape[:-1].numel() * grid.y != batch[0] * batch[1]:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} on y={grid.y} ranks are not those of a batch of {batch[0]} * {batch[1]} "
            "tokens; pass the (sequences, length) of the ids that this rank passed to the model"
        )
    own = own.contiguous()
    tokens = own.new_empty(grid.y, *own.shape)
    grid.collectives.all_gather(tokens, own, "y", "logits").wait()
    return tokens.transpose(0, 1).reshape(*batch, vocabulary)
