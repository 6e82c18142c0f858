"""Is a block that is compiled one graph, is it exact, and is it faster?

A small Llama, forward and backward, with FSDP2: `ff.parallelize(compile=True)` and without, the two in turns; the ratio is that of times
from one round. Graphs are those of all blocks together, which share them; breaks, and graphs that were made after the second step, have
to be none. Gradients are compared with those of the blocks as they are.

    python -m benchmarks.compile                 # needs a C++ compiler, about three minutes on two cores
    python -m benchmarks.compile --grids 1,1,1,2 --activation-checkpointing selective
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import fourfold as ff
from benchmarks.measure import Times, batch, interleaved, llama, ratio, stepper
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.parallel.checkpointing import ActivationCheckpointing

Shape = tuple[int, int, int, int]
GRIDS = "1,1,1,1 1,2,1,1 1,1,1,2 1,1,2,1"
MOST_DIFFERENCE = 1e-5  # of a gradient, relative to its largest entry: fused kernels add in another order


@dataclass(frozen=True)
class Found:
    """Of one grid."""

    eager: Times
    compiled: Times
    difference: float
    graphs: int
    later_graphs: int  # made after the second step
    breaks: int

    @property
    def is_right(self) -> bool:
        return (
            self.graphs == 1
            and self.later_graphs == 0
            and self.breaks == 0
            and self.difference <= MOST_DIFFERENCE
        )


def measure(
    shape: Shape, size: tuple[int, int, int, int], checkpointing: ActivationCheckpointing, rounds: int
) -> Found:
    """Every rank runs this."""
    # Private, and the only place that tells how many graphs there are (torch 2.13.0).
    from torch._dynamo.utils import counters

    hidden, layers, sequences, length = size
    grid = Grid.create(shape)
    config = llama(hidden, layers)
    ids = batch(config, sequences, length)[grid.local_rows(sequences)]
    steps: dict[bool, Any] = {}
    gradients: dict[bool, list[Tensor]] = {}
    torch._dynamo.reset()
    counters.clear()
    graphs = 0
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
        ff.parallelize(
            model,
            grid,
            weights="fsdp2",
            activation_checkpointing=checkpointing,
            compile=is_compiled,
            overlap=ff.Overlap(interleave=False),
        )
        steps[is_compiled] = stepper(model, ids)
        for _ in range(2):
            steps[is_compiled]()
        graphs = int(counters["stats"]["unique_graphs"])
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients[is_compiled] = [_local(p.grad).clone() for p in model.parameters()]
        model.zero_grad()
    difference = max(
        float((mine - right).abs().max() / right.abs().max())
        for right, mine in zip(gradients[False], gradients[True], strict=True)
        if right.numel()
    )
    times = interleaved({"eager": steps[False], "compiled": steps[True]}, rounds)
    later = int(counters["stats"]["unique_graphs"]) - graphs
    return Found(
        times["eager"], times["compiled"], difference, graphs, later, sum(counters["graph_break"].values())
    )


def _local(gradient: Any) -> Tensor:
    found: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grids", nargs="+", default=GRIDS.split())
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--activation-checkpointing", default="none", choices=get_args(ActivationCheckpointing)
    )
    options = parser.parse_args(arguments)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        parser.error("torch.compile on CPU needs a C++ compiler, and there is no g++; install one or set CXX")
    size = options.hidden, options.layers, options.sequences, options.length
    print(
        f"Llama of hidden {size[0]}, {size[1]} layers, {size[2]} x {size[3]} tokens, activation checkpointing "
        f"{options.activation_checkpointing}; Gloo on CPU, fp32, Inductor, load {os.getloadavg()[0]:.1f}"
    )
    right = 0
    with tempfile.TemporaryDirectory() as cache:
        # Fresh, so that first steps compile; one for all ranks, so that only one of them does. No processes beside the ranks.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        for text in options.grids:
            shape = tuple(int(part) for part in text.split(","))
            ranks = shape[0] * shape[1] * shape[2] * shape[3]
            with RankPool(ranks) as pool:
                arguments_of_rank = (shape, size, options.activation_checkpointing, options.rounds)
                found = pool.run(measure, ranks, *arguments_of_rank, timeout_s=900)[0]
            right += found.is_right
            print(
                f"  {shape!s:14} {found.graphs} graphs, {found.breaks} breaks, {found.later_graphs} later graphs, gradients differ "
                f"by {found.difference:.0e}; step {found.eager} as it is, {found.compiled} compiled: "
                f"{ratio(found.eager, found.compiled):.2f} x as fast{'' if found.is_right else '  WRONG'}",
                flush=True,
            )
    print(f"compile: {right}/{len(options.grids)} grids with one graph for all blocks, exact")
    return 0 if right == len(options.grids) else 1


if __name__ == "__main__":
    sys.exit(main())
