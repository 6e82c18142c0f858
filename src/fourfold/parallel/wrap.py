"""Wrap the forward of the model and of its blocks: set up state before it, clean up after it, recompute it in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.mesh.axes import Axis
from fourfold.mesh.kept import BlockResults
from fourfold.mesh.offloading import Offloading
from fourfold.parallel.checkpointing import ActivationCheckpointing
from fourfold.parallel.compiled import compiled
from fourfold.parallel.dropout import Dropout
from fourfold.parallel.linear import FusedLinearGroup, Linear4D
from fourfold.parallel.loss.cross_entropy import LossGuard
from fourfold.parallel.loss.head import HeadLoss
from fourfold.parallel.sequence import Tokens

Keeping = Callable[[tuple[Any, ...]], AbstractContextManager[None]]


class Inside:
    """Entered while a forward runs: then stock modules read local tensors although their parameters are DTensors."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def wrap_model(
    model: nn.Module,
    inside: Inside,
    groups: Sequence[FusedLinearGroup],
    dropout: Dropout | None,
    guard: LossGuard | None,
    tokens: Tokens | None = None,
    head_loss: HeadLoss | None = None,
) -> None:
    """Wrap the model's forward; it runs inside FSDP2's hooks, which handle the parameters themselves."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if tokens is not None:
            tokens.reject_slices(kwargs.get("logits_to_keep"))
        if guard is not None:
            guard.expect()
        try:
            asked = head_loss.expecting(kwargs) if head_loss is not None else nullcontext()
            with inside, asked, tokens.using(None) if tokens is not None else nullcontext():
                output = inner(*args, **kwargs)
        finally:
            if dropout is not None:
                dropout.leave()
            # Unused results must not be mistaken for those of the next forward, or keep a graph alive.
            for group in groups:
                group.settle()
        if guard is not None:
            guard.check(output)
        return output

    model.forward = _not_compiled(forward)


def wrap_block(
    block: nn.Module,
    name: str,
    inside: Inside,
    dropout: Dropout | None,
    *,
    checkpointing: ActivationCheckpointing,
    tokens: Tokens | None = None,
    is_compiled: bool = False,
    offloading: Offloading | None = None,
) -> None:
    """Wrap a block's forward: local tokens in, recomputed in backward if asked for, dropout in the right state.

    ``offloading``: of the input of a block that is recomputed.
    """
    inner = block.forward
    if checkpointing == "selective":
        # Its recomputed forward does not gather the inputs of linears: backward does, while it computes.
        for module in block.modules():
            if isinstance(module, Linear4D):
                module.group.overlap = replace(module.group.overlap, keep_inputs=False)
    # The axes that shard the residual stream.
    axes: tuple[Axis, ...] = ("y",) if tokens is None else ("y", "x")

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with inside:
            if dropout is None:
                return inner(*args, **kwargs)
            dropout.forget()
            dropout.enter(*axes)
            try:
                return inner(*args, **kwargs)
            finally:
                # A recomputed forward is stopped early by an exception, and must not leave its state to the next step.
                dropout.leave()

    def keeping(args: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Around the forward of the block with these arguments."""
        return nullcontext() if offloading is None else offloading.keeping(args, name)

    # Inside FSDP2's hooks, so that the block's weights are gathered in backward before it is recomputed.
    if tokens is not None:
        run = _with_own_tokens(name, tokens, forward, checkpointing, keeping)
    else:
        run = _recomputed(name, forward, checkpointing, keeping)
    block.forward = (
        compiled(block, name, run, checkpointing, tokens, inside, keeping)
        if is_compiled
        else _not_compiled(run)
    )
    if dropout is not None:
        # The checkpoint restores the shared state, so a block has to start with it.
        block.register_forward_pre_hook(lambda *_: dropout.leave())
        block.register_forward_hook(lambda *_: dropout.enter(*axes))


def _not_compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a user's own `torch.compile` leaves as it is: only `compiled` knows how collectives and sharded weights go into a graph."""
    disabled = torch.compiler.disable(forward, reason="parallelize(compile=True) compiles blocks")
    return cast("Callable[..., Any]", disabled)


def _with_own_tokens(
    name: str,
    tokens: Tokens,
    forward: Callable[..., Any],
    checkpointing: ActivationCheckpointing,
    keeping: Keeping,
) -> Callable[..., Any]:
    """The first block selects the local tokens of the batch; the others get them from the previous block."""

    def with_shape(shape: tuple[int, ...], own: Tensor, *args: Any, **kwargs: Any) -> Any:
        with tokens.using(shape):  # another batch may have run before this one is recomputed
            return forward(own, *args, **kwargs)

    run = _recomputed(name, with_shape, checkpointing, keeping)

    def enter(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return run(tokens.shape, tokens.own(hidden_states, name), *args, **kwargs)

    return enter


def _recomputed(
    name: str, forward: Callable[..., Any], checkpointing: ActivationCheckpointing, keeping: Keeping
) -> Callable[..., Any]:
    """``forward`` that backward runs again, all of it or what takes little time."""
    if checkpointing == "none":
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        results = BlockResults(name, is_selective=checkpointing == "selective")
        with keeping(args):
            output = checkpoint(
                forward,
                *args,
                use_reentrant=False,
                context_fn=lambda: (results.forward(), results.again()),
                **kwargs,
            )
        results.omit_last(output)
        return output

    return run


def disable_caches(model: nn.Module) -> int:
    """Turn off key/value caches for training; returns the number of configs that had one turned on.

    The text part of a multimodal model has a config of its own.
    """
    caching = [m.config for m in model.modules() if getattr(getattr(m, "config", None), "use_cache", None)]
    for config in caching:
        config.use_cache = False  # type: ignore[union-attr]
    return len(caching)
