"""How many tokens chose each expert, and the correction bias that evens these numbers out without an auxiliary loss.

Counts are integers, summed over all ranks that have different tokens: the same numbers on every grid, so the bias that follows from
their signs is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.errors import UnsupportedError
from fourfold.hf.experts import correction_bias, is_experts
from fourfold.mesh.axes import Axis
from fourfold.parallel.report import Report


class ExpertLoad:
    """Counts the choices of a parallel model's routers, by layer and expert."""

    def __init__(self, model: nn.Module, report: Report) -> None:
        modules = dict(model.named_modules())
        self.names = [name for name, module in modules.items() if is_experts(module)]
        if not self.names:
            raise UnsupportedError(f"{report.model} has no experts whose tokens could be counted")
        if report.compiled:
            raise UnsupportedError(
                f"{report.model} has compiled blocks, in which the choices of routers cannot be counted; use compile=False"
            )
        self._grid = report.grid
        axes: tuple[Axis, ...] = ("z", "data")
        # Routers on y, and on x with replicated activations, have the same tokens.
        self._axes: tuple[Axis, ...] = ("x", *axes) if report.activations == "sequence-parallel" else axes
        # Zero experts, which return their input, are chosen like others: the bias has a number for them.
        biases = [correction_bias(modules, name) for name in self.names]
        self.experts = [
            _stored(name, report) if bias is None else _tensor(model, bias).numel()
            for name, bias in zip(self.names, biases, strict=True)
        ]
        self._is_counting = False
        self._counts = torch.zeros(
            len(self.names), max(self.experts), dtype=torch.int64, device=self._grid.device
        )
        self.choices = [0] * len(self.names)  # of a token, once the layer has run
        for layer, name in enumerate(self.names):
            modules[name].register_forward_pre_hook(self._counter(layer), with_kwargs=True)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around a forward that trains; a block that backward recomputes does not count again."""
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def _counter(self, layer: int) -> Any:
        def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A forward without gradients inside finds out which linears share an input.
            if not self._is_counting or not torch.is_grad_enabled():
                return
            given = (*args[1:], *kwargs.values())
            chosen = next((g for g in given if isinstance(g, Tensor) and not g.is_floating_point()), None)
            if chosen is None:
                raise UnsupportedError(
                    f"{self.names[layer]} got no choices of its router, so their number is not known; leave expert loads and "
                    "the correction bias off"
                )
            flat = chosen.detach().flatten().long()
            self._counts[layer].scatter_add_(0, flat, torch.ones_like(flat))
            self.choices[layer] = chosen.shape[-1]

        return count

    def take(self) -> Tensor:
        """The counts of all tokens since the last call, [layers, experts], equal on all ranks. All ranks call it."""
        found, self._counts = self._counts, torch.zeros_like(self._counts)
        for axis in self._axes:
            if self._grid.size(axis) > 1:
                self._grid.collectives.all_reduce(found, axis, "balance").wait()
        return found


class CorrectionBias:
    """``bias += rate * sign(mean - count)`` of each layer after a step, as DeepSeek-V3 was trained (arXiv 2408.15664).

    Routers add the bias to their scores when they choose, not when they weight what experts return, so it has no gradient.
    """

    def __init__(self, model: nn.Module, report: Report, load: ExpertLoad) -> None:
        modules = dict(model.named_modules())
        found = [correction_bias(modules, name) for name in load.names]
        if missing := [name for name, bias in zip(load.names, found, strict=True) if bias is None]:
            raise UnsupportedError(
                f"{missing[0]} of {report.model} has no correction bias that its router adds to its scores; use the auxiliary loss, or a "
                "model with one, such as those of DeepSeek-V3"
            )
        if report.lora is not None:
            raise UnsupportedError(
                "the correction bias of routers changes the model, of which adapters alone are trained and saved; leave it off with LoRA"
            )
        self._model, self._report, self._load = model, report, load
        self.names = cast("list[str]", found)

    @torch.no_grad()
    def update(self, counts: Tensor, rate: float, skips: Sequence[Tensor] = ()) -> None:
        """``counts``: those of a step (`ExpertLoad.take`). With one of the flags set it changes nothing, as the optimizer's step."""
        for name, experts, count in zip(self.names, self._load.experts, counts, strict=True):
            own = count[:experts]
            change = rate * torch.sign(own.sum() - experts * own).float()  # in integers, so exact
            for skip in skips:
                change = torch.where(skip, 0.0, change)
            bias = _tensor(self._model, name)
            layout = self._report.layouts.get(name)
            if layout is None:  # a buffer, whole on each rank
                bias.add_(change.view(bias.shape))
                continue
            local = cast(DTensor, bias.detach()).to_local() if isinstance(bias, DTensor) else bias
            local.add_(layout.of(change.view(layout.hf_shape), layout.shard(self._report.grid)))


def _stored(experts: str, report: Report) -> int:
    of_all = (
        layout.hf_shape for layout in report.layouts.values() if layout.hf_name == f"{experts}.down_proj"
    )
    return next(of_all)[0]


def _tensor(model: nn.Module, name: str) -> Tensor:
    """A parameter or a buffer by its name."""
    parent, _, key = name.rpartition(".")
    return cast(Tensor, getattr(model.get_submodule(parent), key))
