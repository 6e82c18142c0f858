"""The input of experts, routers and gates: a hidden state with all its features, gathered over y once for all that read it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import UnsupportedError
from fourfold.mesh.exchange import gather
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_backward
from fourfold.parallel.experts.shares import share_of_gradient


class _Gathered(threading.local):
    """The latest input; one for each thread, because half-batches run in threads."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.key: tuple[Any, ...] = ()
        self.whole: Tensor | None = None


class WholeFeatures:
    """Of one layer. ``by_tokens``: x ranks have different tokens, and otherwise the same ones."""

    def __init__(self, grid: Grid, name: str, hidden: int, by_tokens: bool) -> None:
        self.grid, self.name, self.hidden, self.by_tokens = grid, name, hidden, by_tokens
        self._mine = _Gathered()
        # Who reads what was gathered before, as the first forward has shown; while Dynamo traces, what that is.
        self._reads_again: dict[str, bool] = {}
        self._traced: Tensor | None = None

    def of(self, own: Tensor, reader: str) -> Tensor:
        """The features of all y ranks. Its gradient is summed: each y rank has a part, and each x rank that has the same tokens."""
        expected = self.hidden // self.grid.y
        if own.shape[-1] != expected:
            raise UnsupportedError(
                f"{reader} got {own.shape[-1]} features instead of the {expected} that a rank has of {self.hidden} over y={self.grid.y}: the "
                "code before it reshapes its input by another size; use y=1"
            )
        if self.grid.y == self.grid.x == 1:
            return own
        if torch.compiler.is_compiling():
            if self._traced is None or not self._reads_again.get(reader):
                self._traced = self._gather(own)
            whole = self._traced
        else:
            whole = self._known(own, reader)
        return whole.view(*own.shape[:-1], self.hidden)

    def share(self, whole: Tensor) -> Tensor:
        """``whole`` for work that all ranks with the same tokens repeat: their gradients, which are alike, count once in the sum."""
        is_first = self.by_tokens or self.grid.coordinate("x") == 0
        return share_of_gradient(whole, self.grid.coordinate("y"), self.grid.y, is_first)

    def forget_after(self, module: nn.Module) -> None:
        """The module around the readers: when it is done, nothing is to keep their input alive."""
        module.register_forward_hook(self._forget, always_call=True)

    def _forget(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            self._traced = None
        else:
            mine = self._mine
            mine.input = mine.whole = None

    def _known(self, own: Tensor, reader: str) -> Tensor:
        """Readers get views of one tensor, such as [tokens, features] and [sequences, length, features]."""
        mine = self._mine
        base = own if own._base is None else own._base
        key = (
            own.storage_offset(),
            own.numel(),
            None if own.is_inference() else own._version,
            own.requires_grad,
            torch.is_grad_enabled(),
        )
        is_known = mine.whole is not None and mine.input is base and mine.key == key and own.is_contiguous()
        self._reads_again[reader] = is_known
        if not is_known:
            mine.input, mine.key, mine.whole = base, key, self._gather(own)
        assert mine.whole is not None
        return mine.whole

    def _gather(self, own: Tensor) -> Tensor:
        collectives = self.grid.collectives
        own = own.reshape(-1, own.shape[-1])
        if not self.by_tokens:
            own = sum_backward(own, collectives, "x", "activation", self.name)
        return gather(own, collectives, "y", 1, "activation", self.name)
