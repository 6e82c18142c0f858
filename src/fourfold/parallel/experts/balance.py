"""The auxiliary loss that balances experts, as Hugging Face models add it to their loss: that of the global batch.

    C_e    how many choices fell on expert e            over all layers and all tokens that count
    Q_e    the sum of the router's probabilities of e    the same; the gradient flows through Q alone
    R      rows: tokens that count, once in each layer

    aux = E * sum over e of (C_e / R) * (Q_e / R)

It is not linear in the batch: the mean of the ranks' own auxiliary losses is another number, with other gradients. So C, Q and R,
2E+1 numbers, are summed over half-batches and over every axis that shards tokens, in forward; each rank's backward covers its own Q.

The model computes neither: it runs without `output_router_logits`, and its base model with it, whose output has the logits of all routers.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from fourfold.errors import UnsupportedError
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid
from fourfold.mesh.reductions import sum_forward

_ASKED, _COEFFICIENT = "output_router_logits", "router_aux_loss_coef"
# The arguments of the function in each modelling file that this loss is; one with others is another loss.
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_ATTRIBUTE = "_balance_loss"


class BalanceLoss:
    """Of one model; `balance_loss_of` finds it."""

    def __init__(self, model: Any, grid: Grid, *, by_tokens: bool, is_compiled: bool) -> None:
        self.name, self._config = type(model).__name__, model.config.get_text_config()
        self._model, self._grid, self._is_compiled = model, grid, is_compiled
        axes: tuple[Axis, ...] = ("z", "data")
        # Routers on y, and on x with replicated activations, have the same tokens.
        self._axes: tuple[Axis, ...] = ("x", *axes) if by_tokens else axes
        # By thread, because half-batches run in threads: is it asked for, and the sums of this forward.
        self._mine = threading.local()
        # None: that of the model. And the part of it that one forward has: 1/n where a step has n micro-batches.
        self.coefficient: float | None = None
        self.share = 1.0

    @property
    def is_asked(self) -> bool:
        """Does the model's configuration ask for it?"""
        return bool(getattr(self._config, _ASKED, False))

    @property
    def weight(self) -> float:
        """By which the auxiliary loss of a forward is multiplied."""
        of_model = getattr(self._model, _COEFFICIENT, None)
        if of_model is None:
            of_model = getattr(self._config, _COEFFICIENT)
        return self.share * float(of_model if self.coefficient is None else self.coefficient)

    # -- the sums of one forward, which may be that of a half-batch --------------------------------------------------------

    def collect(self) -> None:
        """Let the forward return the sums of its tokens, [1, 2E+1], in place of the auxiliary loss."""
        inner = self._model.forward
        names = list(inspect.signature(inner).parameters)

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            asked = given.get(_ASKED)
            if not (self.is_asked if asked is None else asked):
                return inner(*args, **kwargs)
            if self._is_compiled:
                raise UnsupportedError(
                    f"{self.name} has compiled blocks, of which the logits of routers cannot be read for the auxiliary loss; use "
                    "compile=False, or output_router_logits=False"
                )
            self._mine.asked, self._mine.mask, self._mine.sums = True, given.get("attention_mask"), None
            try:
                output = inner(**{**given, _ASKED: False})
                sums = self._mine.sums
            finally:
                self._mine.asked, self._mine.mask, self._mine.sums = False, None, None
            if not isinstance(output, ModelOutput):
                raise UnsupportedError(
                    f"{self.name} returned a tuple, to which the auxiliary loss cannot be added; use return_dict=True"
                )
            if sums is None:
                raise UnsupportedError(
                    f"the base model of {self.name} has no logits of routers in its output; use output_router_logits=False"
                )
            return replace(output, aux_loss=sums)

        self._model.forward = torch.compiler.disable(
            forward, reason="parallelize(compile=True) compiles blocks"
        )
        base = self._model.base_model
        base.register_forward_pre_hook(self._ask, with_kwargs=True)
        base.register_forward_hook(self._read)

    def _ask(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, _ASKED: True}) if getattr(self._mine, "asked", False) else None

    def _read(self, _: nn.Module, args: Any, output: Any) -> None:
        if getattr(self._mine, "asked", False) and (logits := getattr(output, "router_logits", None)):
            self._mine.sums = self._sums(logits, self._mine.mask)

    def _sums(self, logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """C, Q and R of this rank's tokens, [1, 2E+1]; the operations are those of transformers."""
        top_k = getattr(self._model, "num_experts_per_tok", None) or self._config.num_experts_per_tok
        counts = queried = rows = torch.zeros((), device=logits[0].device)
        for layer in logits:
            if layer.ndim != 2:
                raise UnsupportedError(
                    f"a router of {self.name} has logits of shape {tuple(layer.shape)} instead of (tokens, experts); use "
                    "output_router_logits=False"
                )
            probabilities = torch.softmax(layer, -1)
            chosen = probabilities.detach().topk(top_k, -1).indices
            counted = layer.new_ones(layer.shape[0], dtype=torch.float32)
            if mask is not None:
                counted = self._own_rows(mask, layer.shape[0]).to(counted)
            ones = counted.unsqueeze(-1).expand(chosen.shape)
            zeros = torch.zeros(layer.shape[1], device=layer.device)
            counts = counts + zeros.scatter_add(0, chosen.flatten(), ones.flatten())
            wide = probabilities.float()
            queried = queried + (wide if mask is None else wide * counted.unsqueeze(-1)).sum(0)
            rows = rows + counted.sum()
        return torch.cat([counts, queried, rows.reshape(1)]).unsqueeze(0)

    def _own_rows(self, mask: Tensor, rows: int) -> Tensor:
        """Which of this rank's tokens count. x ranks have parts of them, in order."""
        flat = mask.reshape(-1)
        if mask.ndim != 2 or flat.numel() not in (rows, rows * self._grid.x):
            raise UnsupportedError(
                f"the attention mask of {self.name} has shape {tuple(mask.shape)}, from which it does not follow which of the {rows} tokens "
                "of a router count; pass (sequences, length), or output_router_logits=False"
            )
        if flat.numel() == rows:
            return flat
        return flat.narrow(0, self._grid.coordinate("x") * rows, rows)

    # -- the loss of the whole batch ------------------------------------------------------------------------------------------

    def add(self) -> None:
        """Let the forward turn the sums of all its tokens into the auxiliary loss, and add it to the loss."""
        inner = self._model.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            sums = getattr(output, "aux_loss", None)
            if sums is None:
                return output
            aux = self._together(sums)
            loss = None if output.loss is None else output.loss + self.weight * aux
            return replace(output, loss=loss, aux_loss=aux)

        self._model.forward = torch.compiler.disable(
            forward, reason="parallelize(compile=True) compiles blocks"
        )

    def _together(self, sums: Tensor) -> Tensor:
        """The auxiliary loss, from the sums of each half-batch."""
        return self._of_all(sums.sum(0))

    def _of_all(self, sums: Tensor) -> Tensor:
        for axis in self._axes:
            sums = sum_forward(sums, self._grid.collectives, axis, "balance", "routers")
        experts = sums.numel() // 2
        counts, queried, rows = sums.split([experts, experts, 1])
        rows = rows.detach()
        aux: Tensor = experts * (counts.detach() / rows * (queried / rows)).sum()
        return aux


def has_balance_loss(model: nn.Module) -> bool:
    """Does the model add the loss that this is? Other auxiliary losses are rejected when they are added."""
    config: Any = getattr(model, "config", None)
    function = getattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func", None)
    if (
        function is None
        or not hasattr(config, "get_text_config")
        or getattr(model, "base_model", model) is model
    ):
        return False
    # Models of text have it as an attribute; those with towers read it in the configuration of their text model.
    text = config.get_text_config()
    has_coefficient = hasattr(model if text is config else text, _COEFFICIENT)
    return has_coefficient and list(inspect.signature(function).parameters) == _ARGUMENTS


def asks_for_balance_loss(model: nn.Module) -> bool:
    """Does the configuration of a model that is not parallel yet ask for it?"""
    config: Any = getattr(model, "config", None)
    return has_balance_loss(model) and bool(getattr(config.get_text_config(), _ASKED, False))


def balance_loss(model: nn.Module, grid: Grid, *, by_tokens: bool, is_compiled: bool) -> BalanceLoss | None:
    """The auxiliary loss of the model, made exact when `collect` and `add` are called; None for one that has none."""
    if not has_balance_loss(model):
        return None
    found = BalanceLoss(model, grid, by_tokens=by_tokens, is_compiled=is_compiled)
    model.__dict__[_ATTRIBUTE] = found  # not a submodule
    return found


def balance_loss_of(model: nn.Module) -> BalanceLoss | None:
    """That of a parallel model."""
    found: BalanceLoss | None = model.__dict__.get(_ATTRIBUTE)
    return found
