"""Sequence parallelism: which tokens each rank has, where activations are sharded over both tensor axes.

The B*S tokens of a batch are split in memory order. On each rank the residual stream holds 1/x of the tokens and 1/y of
the features: [1, B*S/x, hidden/y]. The model's code before the first block and after the last one sees tensors of the
usual shape, [B, S, hidden/y], in which only the local tokens are filled in and the others are zero. That code derives
masks and positions from the shape and works token by token, so the values of the local tokens are right.

Attention modules read the shape of their input. They get a `ShapeProxy`, which has the shape of the full input but no
values; the projections gather the values themselves.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fourfold.errors import UnsupportedError, line_of_model
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.parallel.product.product import Cut


@dataclass(frozen=True)
class Cuts:
    """How a linear's input is sharded over ``out_axis``, and its output over ``in_axis``."""

    enter: Cut
    leave: Cut
    # Where several ranks of ``in_axis`` use the same key/value head: the columns of the full output that this rank uses.
    used_columns: slice | None = None
    kv_heads: int = 0
    # The output of the local tokens is gathered over x: the ranks of latent attention work alike on all tokens of it.
    gathers_output: bool = False


REPLICATED = Cuts("whole", "whole")


class Tokens:
    """How the tokens of the current batch are split over the ranks."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        # Thread-local, because two half-batches may be in the model at the same time.
        self._mine = threading.local()
        # While Dynamo traces a block: the shape of its batch; what stands for an input, and the local tokens that it stands for.
        self.traced_shape: tuple[int, ...] = ()
        self.traced_stand_in: Tensor | None = None
        self.traced_tokens: Tensor | None = None

    def begin(self, ids: Tensor) -> None:
        """Start a forward with these ids."""
        shape = tuple(ids.shape)
        if not self.divide(shape):
            axis, ranks = ("x", self.grid.x) if ids.numel() % self.grid.x else ("y", self.grid.y)
            raise UnsupportedError(
                f"{axis}={ranks} does not divide the {' * '.join(map(str, shape))} = {ids.numel()} tokens of a rank's batch; "
                f"use a number of tokens that is a multiple of {ranks}, or activations='replicated'"
            )
        self._mine.shape = shape

    def reject_slices(self, kept: object) -> None:
        """Reject ``logits_to_keep``: N kept tokens could be mistaken for the N tokens of an x rank."""
        if isinstance(kept, Tensor) or kept:
            raise UnsupportedError(
                f"logits_to_keep={kept} drops some of the tokens, but tokens are sharded over x={self.grid.x} and y={self.grid.y}; "
                "select from the logits of all tokens, or use activations='replicated'"
            )

    def divide(self, shape: tuple[int, ...]) -> bool:
        """Can a batch of this shape be split over x and over y?"""
        return math.prod(shape) % self.grid.x == 0 == math.prod(shape) % self.grid.y

    @property
    def shape(self) -> tuple[int, ...]:
        """(sequences, length) of the batch."""
        if torch.compiler.is_compiling():
            return self.traced_shape
        shape: tuple[int, ...] | None = getattr(self._mine, "shape", None)
        if shape is None:
            raise UnsupportedError(
                "sequence-parallel activations start at the model's embedding, which did not run: pass input_ids, not "
                "inputs_embeds; to recompute blocks in backward use activation_checkpointing='full', not the model's "
                "gradient_checkpointing_enable(); or use activations='replicated'"
            )
        return shape

    @contextmanager
    def using(self, shape: tuple[int, ...] | None) -> Iterator[None]:
        """Use this batch shape inside: None before the batch is known, an earlier one when a block is recomputed."""
        before = getattr(self._mine, "shape", None)
        self._mine.shape = shape
        try:
            yield
        finally:
            self._mine.shape = before

    def count(self, axis: Axis | None = None) -> int:
        """The number of tokens of the batch, or of one rank of ``axis``."""
        return math.prod(self.shape) // self.grid.size(axis)

    def own(self, hidden: Tensor, who: str) -> Tensor:
        """The local tokens of the residual stream, given these alone or in a tensor of the batch's shape."""
        rows = hidden.shape[:-1].numel()
        if rows == self.count("x"):
            return hidden if hidden.ndim == 2 else hidden.reshape(1, rows, hidden.shape[-1])
        if rows != self.count():
            raise UnsupportedError(
                f"{who} got {rows} tokens, neither the {self.count()} of the batch {self.shape} nor the {self.count('x')} "
                "of one x rank: the model's code dropped some of them, and the rest cannot be matched to ranks; keep all tokens, or "
                "use activations='replicated'"
            )
        flat = hidden.reshape(1, rows, hidden.shape[-1])
        own = flat.narrow(1, self.grid.coordinate("x") * self.count("x"), self.count("x"))
        # A view that is saved for backward would keep all tokens alive.
        return own.clone(memory_format=torch.contiguous_format)

    def stand_in(self, own: Tensor) -> Tensor:
        """A tensor of the shape of the full input, while Dynamo traces; its values are not used, as a first forward has shown."""
        self.traced_tokens = own
        self.traced_stand_in = own.new_empty(1).expand(*self.traced_shape, own.shape[-1])
        return self.traced_stand_in

    def traced_own(self, input: Tensor) -> Tensor:
        if self.traced_stand_in is not None and input is self.traced_stand_in:
            assert self.traced_tokens is not None
            return self.traced_tokens
        return input

    def to_batch_shape(self, own: Tensor) -> Tensor:
        """A tensor of the batch's shape with the local tokens at their positions, and zeros elsewhere."""
        if own.shape[:-1].numel() == self.count():
            return own if own.shape[:-1] == self.shape else own.view(*self.shape, own.shape[-1])
        first = self.grid.coordinate("x") * self.count("x")
        return cast(Tensor, _ToBatchShape.apply(own, (*self.shape, own.shape[-1]), first))  # type: ignore[no-untyped-call]


class _ToBatchShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shape: tuple[int, ...], first: int) -> Tensor:
        ctx.first, ctx.own_shape = first, own.shape
        full = own.new_zeros(shape)  # not a view: FSDP2 warns about modules that return views
        flat = own.reshape(-1, shape[-1])
        full.view(-1, shape[-1])[first : first + flat.shape[0]] = flat
        return full

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = ctx.own_shape[:-1].numel()
        flat = gradients[0].reshape(-1, gradients[0].shape[-1])
        return flat[ctx.first : ctx.first + rows].reshape(ctx.own_shape), None, None


class ShapeProxy(Tensor):
    """The shape of a module's full input without its values; ``own`` holds the values of the local tokens.

    Any operation on it raises an error that names the line of code, because there are no values to compute with.
    """

    own: Tensor
    module: str

    @staticmethod
    def __new__(cls, own: Tensor, shape: tuple[int, ...], module: str) -> ShapeProxy:
        proxy = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        proxy.own, proxy.module = own, module
        return proxy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        module = next(a.module for a in tree_leaves((args, kwargs)) if isinstance(a, ShapeProxy))
        line = line_of_model(traceback.extract_stack())
        raise UnsupportedError(
            f"{module} uses its input outside of its projections ({function}, {line}), but with sequence-parallel "
            "activations each rank has only a part of it; use activations='replicated'"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShapeProxy({tuple(self.shape)} of {self.module})"


def show_full_shape(module: nn.Module, name: str, tokens: Tokens) -> None:
    """Let an attention module see the shape of the full hidden states, although it gets the local tokens only."""

    def show(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(own, Tensor):
            raise UnsupportedError(
                f"{name} is called without hidden_states, so it is not known which of its arguments is sharded by tokens; "
                "use activations='replicated'"
            )
        if isinstance(own, ShapeProxy) or own is tokens.traced_stand_in:  # a part of attention
            return args, kwargs
        if torch.compiler.is_compiling():
            proxy = tokens.stand_in(own)
        else:
            proxy = ShapeProxy(tokens.own(own, name), (*tokens.shape, own.shape[-1]), name)
        if args:
            return (proxy, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": proxy}

    # Before the other hooks, which read the shape of the batch from their arguments.
    module.register_forward_pre_hook(show, with_kwargs=True, prepend=True)
