"""What begins and ends with a forward: of the model, and of a block, which may be recomputed in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from fourfold.mesh.axes import Axis
from fourfold.parallel.dropout import Dropout
from fourfold.parallel.linear import FusedLinearGroup
from fourfold.parallel.loss import LossGuard
from fourfold.parallel.sequence import Tokens


class Inside:
    """Is a forward under way? Then stock modules read local tensors where their parameters are DTensors."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def wrap_model(
    model: nn.Module,
    inside: Inside,
    groups: Sequence[FusedLinearGroup],
    dropout: Dropout | None,
    guard: LossGuard | None,
    tokens: Tokens | None = None,
) -> None:
    """Inside FSDP2's hooks, which handle the parameters as they are."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if tokens is not None:
            tokens.refuse_slices(kwargs.get("logits_to_keep"))
        if guard is not None:
            guard.expect()
        try:
            with inside.entered(), tokens.of(None) if tokens is not None else nullcontext():
                output = inner(*args, **kwargs)
        finally:
            if dropout is not None:
                dropout.leave()
            # Results that nobody asked for must not be taken for those of the next forward, or keep its graph alive.
            for group in groups:
                group.settle()
        if guard is not None:
            guard.check(output)
        return output

    model.forward = forward


def wrap_block(
    block: nn.Module,
    name: str,
    inside: Inside,
    dropout: Dropout | None,
    *,
    recomputed: bool,
    tokens: Tokens | None = None,
) -> None:
    inner = block.forward
    # What cuts the residual stream between two linears.
    axes: tuple[Axis, ...] = ("y",) if tokens is None else ("y", "x")

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with inside.entered():
            if dropout is None:
                return inner(*args, **kwargs)
            dropout.forget()
            dropout.enter(*axes)
            try:
                return inner(*args, **kwargs)
            finally:
                # A recomputed forward ends early, by an exception, and must not leave its state to the next step.
                dropout.leave()

    # Inside FSDP2's hooks: backward has gathered the block's weights before the second forward of a recomputed one runs.
    if tokens is not None:
        block.forward = _with_own_tokens(name, tokens, forward, recomputed=recomputed)
    elif recomputed:
        block.forward = functools.partial(recompute, forward, use_reentrant=False)
    else:
        block.forward = forward
    if dropout is not None:
        # The checkpoint restores the shared state, so a block has to begin in it.
        block.register_forward_pre_hook(lambda *_: dropout.leave())
        block.register_forward_hook(lambda *_: dropout.enter(*axes))


def _with_own_tokens(
    name: str, tokens: Tokens, forward: Callable[..., Any], *, recomputed: bool
) -> Callable[..., Any]:
    """The first block takes its rank's tokens out of the whole batch; the others get them from the one before."""

    def of_batch(shape: tuple[int, ...], own: Tensor, *args: Any, **kwargs: Any) -> Any:
        with tokens.of(shape):  # a recomputed forward comes when another batch may have been in the model
            return forward(own, *args, **kwargs)

    def enter(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = (tokens.shape, tokens.own(hidden_states, name), *args)
        if recomputed:
            return recompute(of_batch, *arguments, use_reentrant=False, **kwargs)
        return of_batch(*arguments, **kwargs)

    return enter


def disable_caches(model: nn.Module) -> int:
    """Keep no key/value cache in training; returns how many configurations asked for one.

    The part of a multimodal model that reads text has a configuration of its own.
    """
    caching = [m.config for m in model.modules() if getattr(getattr(m, "config", None), "use_cache", None)]
    for config in caching:
        config.use_cache = False  # type: ignore[union-attr]
    return len(caching)
