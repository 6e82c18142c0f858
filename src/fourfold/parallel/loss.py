"""Cross entropy over a vocabulary that is cut over x, averaged over the tokens of the whole global batch.

Only two vectors of one number a token go over x: the maximum, then the sum of exponentials with the label's logit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import UnsupportedError
from fourfold.hf.parameter_layout import chunk
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel.embedding import check_range

IGNORE_INDEX = -100


class _TokenLoss(torch.autograd.Function):
    """Sum over tokens of -log p(label) + z_loss * log(Z)^2, in fp32 whatever the logits are.

    The logits are saved as they came and their exponentials computed again in backward: of a tensor this size, an
    fp32 copy is what one can least afford.
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
        wide = logits.float()
        width = logits.shape[-1]
        local = labels - first
        here = (local >= 0) & (local < width) & (labels != ignore_index)
        counted = labels != ignore_index

        # A rank may hold no column at all, if the vocabulary is smaller than x.
        highest = wide.amax(-1) if width else wide.new_full(labels.shape, float("-inf"))
        grid.collectives.all_reduce(highest, "x", "loss", dist.ReduceOp.MAX).wait()
        sums = wide.new_zeros(2, *labels.shape)
        if width:
            torch.sum(torch.exp(wide - highest.unsqueeze(-1)), -1, out=sums[0])
            picked = wide.gather(-1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
            sums[1] = torch.where(here, picked, 0.0)
        grid.collectives.all_reduce(sums, "x", "loss").wait()
        log_z = highest + sums[0].log()
        token_loss = log_z - sums[1] + z_loss * log_z.square()

        ctx.save_for_backward(logits, log_z, local, here, counted)
        ctx.z_loss = z_loss
        return torch.where(counted, token_loss, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_z, local, here, counted = ctx.saved_tensors
        gradient = torch.exp(logits.float() - log_z.unsqueeze(-1))
        gradient *= (1.0 + 2.0 * ctx.z_loss * log_z).unsqueeze(-1)
        if logits.shape[-1]:
            index = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
            gradient.scatter_add_(-1, index, -here.to(gradient.dtype).unsqueeze(-1))
        gradient *= (counted * gradients[0]).unsqueeze(-1)
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
    """The mean cross entropy of the global batch, the same number on every rank.

    ``logits``: this rank's columns of the vocabulary (``model(ids).logits``), ``labels``: what each position should
    predict, not shifted here. The mean is over the labels of the whole global batch that are not ``ignore_index``,
    also when ranks hold different counts. Of token-sharded activations a y rank has the logits of 1/y of the tokens; give
    the labels of all. When gradients are accumulated over several calls, pass the number of such
    labels in all of them as ``num_items`` (`count_labels`), so that the accumulated gradient is that of one mean.
    With ``vocab_size`` the width of the logits is checked against it; without, the ranks tell each other theirs.

    Example:
        >>> labels = torch.full_like(ids, IGNORE_INDEX)
        >>> labels[:, :-1] = ids[:, 1:]  # each position predicts the next token
        >>> loss = cross_entropy(model(input_ids=ids).logits, labels, grid)
        >>> loss.backward()
    """
    labels_of_all, labels = labels, _own_labels(logits, labels, grid)
    are_cut = labels is not labels_of_all
    if logits.shape[:-1] != labels.shape:
        cut = f", which may be those of 1/{grid.y} of the tokens" if grid.y > 1 else ""
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}{cut}: give one label for "
            "each position of the batch"
        )
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    first, vocabulary = _columns(logits, grid, vocab_size)
    # On all ranks alike: one that refuses alone would leave the others waiting.
    check_range(labels_of_all.to(logits.device), vocabulary, "a label", ignore_index)
    labels = labels.to(logits.device)
    if num_items is None:
        num_items = count_labels(labels_of_all, grid, ignore_index=ignore_index)
    arguments = (logits, labels, first, ignore_index, z_loss, grid)
    loss = cast(Tensor, _TokenLoss.apply(*arguments)) / num_items  # type: ignore[no-untyped-call]
    # Each rank's backward goes through its own tokens; FSDP2 and the data axis sum the gradients.
    axes: tuple[Axis, ...] = ("y", "z", "data") if are_cut else ("z", "data")
    for axis in axes:
        loss = sum_forward(loss, grid.collectives, axis, "loss")
    return loss


def _own_labels(logits: Tensor, labels: Tensor, grid: Grid) -> Tensor:
    """The labels of the logits' tokens: of token-sharded activations a y rank has 1/y of them, in their order."""
    rows = logits.shape[:-1]
    if grid.y == 1 or len(rows) != 2 or labels.numel() != grid.y * rows.numel():
        return labels
    # Halves of a batch that went through the model by themselves are cut each for itself.
    return labels.reshape(rows[0], grid.y, rows[1])[:, grid.coordinate("y")].contiguous()


def _columns(logits: Tensor, grid: Grid, vocab_size: int | None) -> tuple[int | Tensor, int | Tensor]:
    """(the first column of the vocabulary that this rank holds, the columns of all ranks)."""
    if vocab_size is None:
        widths = _widths(logits, grid)
        return widths[: grid.coordinate("x")].sum(), widths.sum()
    columns = chunk(vocab_size, grid.x, grid.coordinate("x"))
    if logits.shape[-1] != columns.stop - columns.start:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, but a vocabulary of {vocab_size} over x={grid.x} gives this rank "
            f"{columns.stop - columns.start}; pass the logits as the model gave them (not gathered), and its vocab_size"
        )
    return columns.start, vocab_size


def _widths(logits: Tensor, grid: Grid) -> Tensor:
    """How many columns each x rank holds; on the device, so that nobody waits for it."""
    own = torch.full((1,), logits.shape[-1], device=logits.device)
    widths = own.new_empty(grid.x)
    grid.collectives.all_gather(widths, own, "x", "loss").wait()
    return widths


def count_labels(
    labels: Tensor, grid: Grid, *, shift: bool = False, ignore_index: int = IGNORE_INDEX, at_least: int = 1
) -> Tensor:
    """How many labels of the global batch count, the same on every rank; at least 1, so that a mean is defined.

    ``labels`` are those of this rank's rows. With ``shift`` they are labels as a Hugging Face causal LM takes them, the
    first of each row not counting, because no position predicts it.

    Example:
        >>> int(count_labels(torch.tensor([5, 6, IGNORE_INDEX]), grid))
        2
    """
    count = ((labels[..., 1:] if shift else labels) != ignore_index).sum().to(grid.device)
    for axis in ("z", "data"):
        grid.collectives.all_reduce(count, axis, "loss").wait()
    return count.clamp(min=at_least)


class LossGuard:
    """Hugging Face's ``loss_function`` for sharded logits: ``model(input_ids, labels=labels).loss`` stays exact.

    What else a model may call its loss, it would compute from a part of the vocabulary or average over a part of the
    batch; `check` refuses that.
    """

    def __init__(self, model: str, grid: Grid, vocab_size: int | None, stock: str) -> None:
        self._model, self._grid, self._vocab_size, self._stock = model, grid, vocab_size, stock
        # By thread: the halves of an interleaved batch are in the model at the same time.
        self._given: dict[int, tuple[Tensor, int]] = {}

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
        if self._stock not in ("ForCausalLMLoss", "ForMaskedLMLoss"):
            raise UnsupportedError(
                f"{self._model} has the loss {self._stock}, which Fourfold does not know for a batch cut over data*z="
                f"{self._grid.batch_ranks} and a vocabulary cut over x={self._grid.x}; leave the labels away and compute "
                "the loss from the logits (ff.cross_entropy)"
            )
        if shift_labels is not None:
            targets = shift_labels
        else:
            assert labels is not None
            targets = labels
            if self._stock == "ForCausalLMLoss":
                targets = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if targets.numel() == logits.shape[:-1].numel():  # a flat list of labels is one for each position too
            targets = targets.reshape(logits.shape[:-1]).contiguous()
        loss = cross_entropy(
            logits,
            targets,
            self._grid,
            vocab_size=self._vocab_size,
            ignore_index=ignore_index,
            num_items=num_items_in_batch,
        )
        self._given[threading.get_ident()] = (loss, _version(loss))
        return loss

    def count(self, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int | None) -> Tensor:
        """How many labels of the global batch this loss is the mean of."""
        ignore_index = IGNORE_INDEX if ignore_index is None else ignore_index
        if shift_labels is not None:
            return count_labels(shift_labels, self._grid, ignore_index=ignore_index)
        assert labels is not None
        shift = self._stock == "ForCausalLMLoss"
        return count_labels(labels, self._grid, shift=shift, ignore_index=ignore_index)

    def expect(self) -> None:
        """A forward begins."""
        self._given.pop(threading.get_ident(), None)

    def check(self, output: Any) -> None:
        """A forward is over: if it gave a loss, it has to be the one that came from here, unchanged."""
        loss = loss_of(output)
        if loss is None:
            return
        given = self._given.pop(threading.get_ident(), None)
        if given is None or given[0] is not loss or given[1] != _version(loss):
            raise UnsupportedError(
                f"{self._model} computes a loss of its own, or adds to it (an auxiliary loss of a router), which would be "
                f"that of one rank's part of data*z={self._grid.batch_ranks}, x={self._grid.x}; leave the labels away and "
                "compute the loss from the logits (ff.cross_entropy), or turn the addition off"
            )


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a model gave, if it gave one."""
    loss = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.ndim == 0 else None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def guard_loss(model: torch.nn.Module, grid: Grid, vocab_size: int | None) -> LossGuard | None:
    """Put the exact loss in the place of the model's own; nothing to do where neither the batch nor the model is cut."""
    if grid.batch_ranks * grid.x * grid.y == 1:
        return None
    stock: Any = getattr(model, "loss_function", None)
    guard = LossGuard(
        type(model).__name__, grid, vocab_size, getattr(stock, "__name__", type(stock).__name__)
    )
    if stock is not None:
        model.loss_function = guard  # type: ignore[assignment]  # Hugging Face has a setter for it
    return guard


def full_logits(
    logits: Tensor, grid: Grid, *, vocab_size: int | None = None, batch: Sequence[int] | None = None
) -> Tensor:
    """All columns of the vocabulary on every x rank, for evaluation; gradients do not flow through.

    Of token-sharded activations a y rank has 1/y of the tokens; with y > 1 the ``batch``, (sequences, length), says how many
    there are.

    Example:
        >>> full_logits(model(input_ids=ids).logits, grid, vocab_size=131, batch=ids.shape).shape[-1]
        131
    """
    if grid.y > 1 and batch is None:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} on y={grid.y} ranks may be those of a part of the tokens; pass "
            "batch=ids.shape, of the ids that this rank gave to the model"
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
            "tokens; pass the (sequences, length) of the ids that this rank gave to the model"
        )
    own = own.contiguous()
    tokens = own.new_empty(grid.y, *own.shape)
    grid.collectives.all_gather(tokens, own, "y", "logits").wait()
    return tokens.transpose(0, 1).reshape(*batch, vocabulary)
