"""A small mixture of experts, and the ways to put it on a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fourfold as ff
from benchmarks.tiny_models import find_family, tiny_model
from fourfold import Grid
from fourfold.hf.experts import beside_all_experts
from fourfold.mesh.axes import Axis
from fourfold.parallel.experts.choice import Experts
from fourfold.parallel.options import Activations
from fourfold.parallel.report import Report
from fourfold.weights.api import Weights
from fourfold.weights.overlap import Overlap

Shape = tuple[int, int, int, int]
ROWS = 8
COEFFICIENT = 0.5  # of the auxiliary loss: large, so that a wrong one is a wrong gradient


@dataclass(frozen=True)
class Way:
    """A grid, and how experts, weights and activations are on it."""

    shape: Shape
    experts: Experts = "cut"
    weights: Weights = "streamed"
    activations: Activations = "sequence-parallel"

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    @property
    def owners(self) -> tuple[Axis, ...]:
        """The axes whose ranks own experts."""
        return self.experts if isinstance(self.experts, tuple) else ()

    def __str__(self) -> str:
        experts = f"owned over {' and '.join(self.owners)}" if self.owners else self.experts
        return f"{self.shape!s:14} {experts:19} {self.weights:8} {self.activations:17}"


@dataclass(frozen=True)
class Routing:
    """The model, and what its routers choose. With equal scores all tokens choose the same experts."""

    family: str = "qwen3_moe"
    experts: int = 8
    chosen: int = 2
    scores: Literal["random", "equal", "equal in pairs"] = "random"
    has_aux_loss: bool = False

    def build(self) -> Any:
        model: Any = tiny_model(find_family(self.family), experts=self.experts, chosen=self.chosen)
        if self.scores != "random":
            for name in beside_all_experts(model):
                for parameter in model.get_submodule(name).parameters():
                    set_scores(parameter, self.scores)
        if self.has_aux_loss:
            config = model.config.get_text_config()
            config.output_router_logits, config.router_aux_loss_coef = True, COEFFICIENT
            model.router_aux_loss_coef = COEFFICIENT
        return model


@torch.no_grad()
def set_scores(router: Tensor, scores: str) -> None:
    if scores == "equal":
        router.zero_()
    else:  # each score is that of two experts
        router[1::2] = router[0::2]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute is another: a planted fault."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def on_grid(model: nn.Module, way: Way, grid: Grid, overlap: Overlap | None = None) -> Report:
    return ff.parallelize(
        model,
        grid,
        experts=way.experts,
        weights=way.weights,
        activations=way.activations,
        overlap=overlap,
    )
