"""Which tokens are a rank's own, where activations are cut over both tensor axes.

The B*S tokens of a batch are dealt out in the order they have in memory. The residual stream holds 1/x of them and 1/y
of their features: [1, B*S/x, hidden/y]. The model's own code in front of the first block and behind the last sees
tensors of the usual shape, [B, S, hidden/y], of which a rank fills in its own tokens and leaves the others zero: that
code makes masks and positions by this shape and works token by token, so its own tokens come out right.

Attention reads the shape of its input, and sees a `ShapeProxy`: the shape without the numbers, which the projections
gather themselves.
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
from fourfold.mesh.collectives import Collectives
from fourfold.mesh.grid import Grid
from fourfold.parallel.linear_op import Cut


@dataclass(frozen=True)
class Cuts:
    """How a linear's input is cut over ``out_axis``, and its output over ``in_axis``."""

    enter: Cut
    leave: Cut
    # Key/value heads of which several ranks of ``in_axis`` use one: the columns that this rank uses of a complete output.
    used_columns: slice | None = None
    kv_heads: int = 0


REPLICATED = Cuts("whole", "whole")


class Tokens:
    """The tokens of the batch that is in the model."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        # By thread: the halves of an interleaved batch are in the model at the same time.
        self._mine = threading.local()

    def begin(self, ids: Tensor) -> None:
        """A forward begins with these ids."""
        shape = tuple(ids.shape)
        if not self.divide(shape):
            axis, ranks = ("x", self.grid.x) if ids.numel() % self.grid.x else ("y", self.grid.y)
            raise UnsupportedError(
                f"{axis}={ranks} does not divide the {' * '.join(map(str, shape))} = {ids.numel()} tokens of a rank's batch; "
                f"use sequences whose tokens divide by {ranks}, or activations='replicated'"
            )
        self._mine.shape = shape

    def refuse_slices(self, kept: object) -> None:
        """``kept``: what is asked for as ``logits_to_keep``. As many as an x rank has would be taken for its own."""
        if isinstance(kept, Tensor) or kept:
            raise UnsupportedError(
                f"logits_to_keep={kept} leaves some of the tokens out, and they are cut over x={self.grid.x} and y={self.grid.y}; "
                "take them from the logits of all, or use activations='replicated'"
            )

    def divide(self, shape: tuple[int, ...]) -> bool:
        """Can a batch of this shape be dealt out?"""
        return math.prod(shape) % self.grid.x == 0 == math.prod(shape) % self.grid.y

    @property
    def shape(self) -> tuple[int, ...]:
        """(sequences, length) of the batch."""
        shape: tuple[int, ...] | None = getattr(self._mine, "shape", None)
        if shape is None:
            raise UnsupportedError(
                "token-sharded activations begin at the model's embedding, which did not run: pass input_ids, not "
                "inputs_embeds; for blocks that compute again in backward use activation_checkpointing='full', not the model's "
                "gradient_checkpointing_enable(); or use activations='replicated'"
            )
        return shape

    @contextmanager
    def of(self, shape: tuple[int, ...] | None) -> Iterator[None]:
        """A forward begins, of a batch that is not known yet; or a block computes again for an earlier one."""
        before = getattr(self._mine, "shape", None)
        self._mine.shape = shape
        try:
            yield
        finally:
            self._mine.shape = before

    def count(self, axis: Axis | None = None) -> int:
        """The tokens of the batch, or of one rank of ``axis``."""
        return math.prod(self.shape) // self.grid.size(axis)

    def own(self, hidden: Tensor, who: str) -> Tensor:
        """This rank's tokens of the residual stream, whether they come alone or in their places."""
        rows = hidden.shape[:-1].numel()
        if rows == self.count("x"):
            return hidden if hidden.ndim == 2 else hidden.reshape(1, rows, hidden.shape[-1])
        if rows != self.count():
            raise UnsupportedError(
                f"{who} got {rows} tokens, neither the {self.count()} of the batch {self.shape} nor the {self.count('x')} "
                "of one x rank: the model's code took some of them away, which cannot be told from another cut; let it keep all, or "
                "use activations='replicated'"
            )
        flat = hidden.reshape(1, rows, hidden.shape[-1])
        own = flat.narrow(1, self.grid.coordinate("x") * self.count("x"), self.count("x"))
        return own.clone()  # a view, kept for backward, would keep all of it

    def placed(self, own: Tensor) -> Tensor:
        """A tensor of the usual shape with this rank's tokens in their places, the others zero."""
        if own.shape[:-1].numel() == self.count():
            return own if own.shape[:-1] == self.shape else own.view(*self.shape, own.shape[-1])
        first = self.grid.coordinate("x") * self.count("x")
        return cast(Tensor, _Placed.apply(own, (*self.shape, own.shape[-1]), first))  # type: ignore[no-untyped-call]


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shape: tuple[int, ...], first: int) -> Tensor:
        ctx.first, ctx.own_shape = first, own.shape
        whole = own.new_zeros(shape)  # and not a view: FSDP2 warns of a module that returns one
        flat = own.reshape(-1, shape[-1])
        whole.view(-1, shape[-1])[first : first + flat.shape[0]] = flat
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = ctx.own_shape[:-1].numel()
        flat = gradients[0].reshape(-1, gradients[0].shape[-1])
        return flat[ctx.first : ctx.first + rows].reshape(ctx.own_shape), None, None


class _Scattered(torch.autograd.Function):
    """Parts of a sum over x, for all tokens, become the sums of a rank's own; the gradients of all are gathered."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, collectives: Collectives, module: str) -> Tensor:
        ctx.collectives, ctx.module, ctx.shape = collectives, module, parts.shape
        parts = parts.contiguous()
        own = parts.new_empty(1, parts.shape[:-1].numel() // collectives.size("x"), parts.shape[-1])
        pending = collectives.reduce_scatter(own, parts, "x", "activation", module=module)
        if collectives.interleaving is not None:
            collectives.interleaving.switch()
        pending.wait()
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0].contiguous()
        whole = own.new_empty(ctx.shape)
        ctx.collectives.all_gather(whole, own, "x", "activation", module=ctx.module).wait()
        return whole, None, None


def scattered(parts: Tensor, collectives: Collectives, module: str) -> Tensor:
    if collectives.size("x") == 1:
        return parts
    return cast(Tensor, _Scattered.apply(parts, collectives, module))  # type: ignore[no-untyped-call]


class ShapeProxy(Tensor):
    """The shape of a module's input without its numbers; ``own`` has those of this rank's tokens.

    Whoever computes with it would compute with nothing: it is refused, with the line of code that did.
    """

    own: Tensor
    module: str

    @staticmethod
    def __new__(cls, own: Tensor, shape: tuple[int, ...], module: str) -> ShapeProxy:
        stand_in = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        stand_in.own, stand_in.module = own, module
        return stand_in

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        module = next(a.module for a in tree_leaves((args, kwargs)) if isinstance(a, ShapeProxy))
        line = line_of_model(traceback.extract_stack())
        raise UnsupportedError(
            f"{module} computes with its input otherwise than by its projections ({function}, {line}), but of token-sharded "
            "activations it has only a part; use activations='replicated'"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.shape)} of {self.module})"


def show_whole_shape(module: nn.Module, name: str, tokens: Tokens) -> None:
    """Let an attention see the shape of the complete hidden states, where it gets its rank's own tokens."""

    def show(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(own, Tensor):
            raise UnsupportedError(
                f"{name} is called without hidden_states, so it is not known which of its arguments is sharded by tokens; "
                "use activations='replicated'"
            )
        proxy = ShapeProxy(tokens.own(own, name), (*tokens.shape, own.shape[-1]), name)
        if args:
            return (proxy, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": proxy}

    # First: other hooks read the shape of the batch from what they are given.
    module.register_forward_pre_hook(show, with_kwargs=True, prepend=True)
