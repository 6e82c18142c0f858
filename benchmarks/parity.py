"""Does every grid train exactly like one process?

Three AdamW steps with clipping of a small model of each kind, on every factorisation of the ranks into
(data, z, y, x), against the stock Hugging Face model in one process, in fp32. Compared on every rank, shard by shard:
the loss of each step, every gradient of each step (as clipped), every parameter after the third.

    python -m benchmarks.parity --ranks 8
    python -m benchmarks.parity --ranks 8 --weights fsdp2   # or streamed
    python -m benchmarks.parity --ranks 8 --activations replicated   # by default cut by their tokens, too
    python -m benchmarks.parity --ranks 8 --activation-checkpointing selective   # or full
    python -m benchmarks.parity --ranks 8 --accumulation sharded   # of two micro-batches
    python -m benchmarks.parity --ranks 8 --compile --weights fsdp2   # blocks by aot_eager, without code generation
    python -m benchmarks.parity --ranks 8 --float8 rowwise_with_gw_hp   # in fp64, with operands in e4m3
    python -m benchmarks.parity --ranks 8 --break norm      # plants a fault: has to fail
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.float8 import BAR, in_fp64, stock_in_float8
from benchmarks.ranks import RankPool
from fourfold.mesh.axes import Axis, factorisations
from fourfold.mesh.collectives import Pending
from fourfold.mesh.grid import Grid
from fourfold.parallel import compiled, layers
from fourfold.parallel.checkpointing import ActivationCheckpointing
from fourfold.parallel.float8.choice import Float8Recipe
from fourfold.parallel.loss import cross_entropy as loss
from fourfold.parallel.options import ActivationsWanted
from fourfold.parallel.product.product import Cut, Product
from fourfold.selftest import (
    EPS,
    GRADIENT_BAR,
    KINDS,
    LEARNING_RATE,
    LOSS_BAR,
    MAX_NORM,
    PARAMETER_BAR,
    STEPS,
    Errors,
    train_on,
)
from fourfold.weights.api import Accumulation, Weights

GRIDS_OF_16 = ((2, 2, 2, 2), (1, 4, 2, 2), (1, 1, 4, 4), (1, 2, 2, 4), (4, 1, 2, 2))
QUICK_GRIDS_OF_8 = ((1, 1, 1, 8), (1, 1, 8, 1), (8, 1, 1, 1), (1, 2, 2, 2), (2, 2, 1, 2), (2, 1, 4, 1))
FAULTS = ("norm", "sibling-reduce", "loss")


@contextmanager
def injected(fault: str) -> Iterator[None]:
    """A fault in one kind of layer, for as long as it lasts."""
    saved = (layers.sum_both, loss.LabelCount, Product.reduce)
    if fault == "norm":  # each shard normalises by its own statistics
        layers.sum_both = lambda part, collectives, axis, *_: part * collectives.size(axis)
    elif fault == "loss":  # the mean over the labels of this rank, not of the global batch
        loss.LabelCount = lambda labels, grid, **_: lambda: (labels != -100).sum().clamp(min=1)  # type: ignore[misc, assignment]
    elif fault == "sibling-reduce":  # q, k, v and gate, up forget to sum the gradient of their input
        Product.reduce = _forgetful(Product.reduce)  # type: ignore[method-assign]
    try:
        yield
    finally:
        layers.sum_both, loss.LabelCount, Product.reduce = saved  # type: ignore[method-assign]


def _forgetful(reduce: Callable[..., Pending]) -> Callable[..., Pending]:
    """A rank takes its own part of the input's gradient for the sum over x."""

    def part_of_one(product: Product, own: Tensor, parts: Tensor, axis: Axis | None, cut: Cut) -> Pending:
        if axis != "x" or product.out_axis != "x":
            return reduce(product, own, parts, axis, cut)
        if cut != "whole" and product.out_ranks > 1:
            rank = dist.get_rank() % product.out_ranks  # x is the innermost axis
            own.view(-1).copy_(parts.reshape(product.out_ranks, -1)[rank])
        return Pending()

    return part_of_one


def run_rank(
    shape: tuple[int, int, int, int],
    kind: str,
    fault: str | None,
    options: dict[str, Any] | None = None,
) -> Errors:
    """``options`` of `train_on`."""
    compiled.BACKEND = "aot_eager"
    torch._dynamo.reset()
    options = dict(options or {})
    is_float8 = options.get("float8", "none") != "none"
    if is_float8:
        options["stock"] = stock_in_float8
    with injected(fault) if fault else nullcontext(), in_fp64() if is_float8 else nullcontext():
        return train_on(Grid.create(shape, timeout_s=300), kind, **options)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, choices=(2, 4, 8, 16))
    parser.add_argument("--models", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--weights", default="auto", choices=get_args(Weights))
    parser.add_argument("--activations", default="sequence-parallel", choices=get_args(ActivationsWanted))
    parser.add_argument(
        "--activation-checkpointing", default="none", choices=get_args(ActivationCheckpointing)
    )
    parser.add_argument(
        "--accumulation",
        choices=get_args(Accumulation),
        help="steps of two micro-batches, whose gradients are accumulated so",
    )
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--float8",
        default="none",
        choices=get_args(Float8Recipe),
        help="matmuls of linears in blocks; compared in fp64 with a stock model that rounds to e4m3 (default: none)",
    )
    parser.add_argument("--quick", action="store_true", help="a few grids of 8 ranks instead of all")
    parser.add_argument(
        "--break", dest="fault", choices=FAULTS, help="plant a fault: the command has to fail"
    )
    options = parser.parse_args(arguments)

    grids = list(GRIDS_OF_16) if options.ranks == 16 else factorisations(options.ranks)
    if options.quick and options.ranks == 8:
        grids = list(QUICK_GRIDS_OF_8)
    is_float8 = options.float8 != "none"
    print(
        f"bars: {BAR:g}, in fp64"
        if is_float8
        else f"bars: loss {LOSS_BAR:g} relative, gradients {GRADIENT_BAR:g}, parameters {PARAMETER_BAR:g} of their maximum"
    )
    wanted: dict[str, Any] = {
        "weights": options.weights,
        "activations": options.activations,
        "activation_checkpointing": options.activation_checkpointing,
        "compile": options.compile,
        "float8": options.float8,
    }
    if options.accumulation:
        wanted |= {"micro_batches": 2, "accumulation": options.accumulation}
    more = (
        f", gradients of two micro-batches accumulated {options.accumulation}" if options.accumulation else ""
    )
    more += ", blocks compiled" if options.compile else ""
    more += f", float8 {options.float8}" if is_float8 else ""
    print(
        f"weights {options.weights}, activations {options.activations}, activation checkpointing {options.activation_checkpointing}{more}; {STEPS} AdamW steps, lr {LEARNING_RATE:g}, eps {EPS:g}, norm clipped to {MAX_NORM:g}; Gloo on CPU, {'fp64' if is_float8 else 'fp32'}"
    )
    print(f"{'model':10} {'(data, z, y, x)':16} {'loss':>9} {'gradient':>9} {'parameter':>9}")
    start_s = time.perf_counter()
    held, failed, worst = 0, 0, 0.0
    with RankPool(options.ranks) as pool:
        for kind in options.models:
            for shape in grids:
                arguments_of_rank = shape, kind, options.fault, wanted
                errors = Errors.worst(pool.run(run_rank, options.ranks, *arguments_of_rank, timeout_s=900))
                good = errors.within_bars()
                if is_float8:
                    good = max(errors.loss, errors.gradient, errors.parameter) <= BAR
                held, failed = held + good, failed + (not good)
                worst = max(worst, errors.gradient)
                verdict = "" if good else f"  FAILED, worst in {errors.worst_gradient}"
                figures = f"{errors.loss:9.1e} {errors.gradient:9.1e} {errors.parameter:9.1e}"
                print(f"{kind:10} {shape!s:16} {figures}{verdict}", flush=True)
    print(
        f"parity: {held}/{held + failed} model and grid pairs exact, worst gradient error {worst:.2e}, "
        f"{time.perf_counter() - start_s:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
