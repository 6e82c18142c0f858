"""Does torch.compile make a step faster, and is it exact?

Each transformer block's forward is compiled before the model is made parallel, as one would do with a stock model. A small
Llama, forward and backward, the ways in turns; the ratio is that of times from one round. The stock model on one rank shows
what compiling can bring on this machine at all.

    python -m benchmarks.compile                 # needs a C++ compiler, about four minutes on two cores
    python -m benchmarks.compile --grids 1,1,1,1
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import fourfold as ff
from benchmarks.measure import Times, batch, interleaved, llama, ratio, stepper
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.hf.anatomy import find_blocks

Shape = tuple[int, int, int, int]
GRIDS = "1,1,1,1 1,1,1,2"
STOCK, COMPILED = "stock model", ", blocks compiled"


@dataclass(frozen=True)
class Found:
    """Of one grid."""

    times: dict[str, Times]
    first_step_s: dict[str, float]
    # The largest difference of a gradient from that of the way that is not compiled, relative to its largest entry.
    difference: dict[str, float]
    graphs: dict[str, int]
    breaks: dict[str, int]


def measure(shape: Shape, hidden: int, layers: int, sequences: int, length: int, rounds: int) -> Found:
    """Every rank runs this."""
    # Private, and the only place that tells how many graphs there are (torch 2.13.0).
    from torch._dynamo.utils import counters

    grid = Grid.create(shape)
    config = llama(hidden, layers)
    ids = batch(config, sequences, length)[grid.local_rows(sequences)]
    ways = ["streamed"] if grid.mesh.size() > 1 else [STOCK, "streamed"]
    steps, first_step_s, gradients, graphs, breaks = {}, {}, {}, {}, {}
    for way in ways:
        for is_compiled in (False, True):
            name = way + COMPILED if is_compiled else way
            torch._dynamo.reset()
            counters.clear()
            model = _model(config, grid, way, is_compiled)
            start_s = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            first_step_s[name] = time.perf_counter() - start_s
            graphs[name] = int(counters["stats"]["unique_graphs"])
            breaks[name] = sum(counters["graph_break"].values())
            gradients[name] = _gradients(model)
            model.zero_grad()
            steps[name] = stepper(model, ids)
            for _ in range(2):
                steps[name]()
    torch._dynamo.config.recompile_limit = 64  # what is compiled for one model is not thrown out by the next
    for step in steps.values():
        step()
    difference = {
        name: max(
            float((g - gradients[name.removesuffix(COMPILED)][n]).abs().max() / g.abs().max())
            for n, g in gradients[name].items()
            if g.numel()
        )
        for name in gradients
    }
    return Found(interleaved(steps, rounds), first_step_s, difference, graphs, breaks)


def _model(config: Any, grid: Grid, way: str, is_compiled: bool) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    if is_compiled:
        for block in find_blocks(model):
            block.forward = torch.compile(block.forward, dynamic=False)
    if way != STOCK:
        # Without lanes, either way: their threads would wait for each other's compiler.
        ff.parallelize(model, grid, weights="streamed", overlap=ff.Overlap(interleave=False))
    return model


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        gradients[name] = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()
    return gradients


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grids", nargs="+", default=GRIDS.split())
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        parser.error("torch.compile on CPU needs a C++ compiler, and there is no g++; install one or set CXX")
    grids = [tuple(int(size) for size in text.split(",")) for text in options.grids]
    with tempfile.TemporaryDirectory() as cache:
        # Fresh, so that first steps compile; one for all ranks, so that only one of them does. No processes beside the ranks.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        for shape in grids:
            ranks = shape[0] * shape[1] * shape[2] * shape[3]
            with RankPool(ranks) as pool:
                size = options.hidden, options.layers, options.sequences, options.length
                found = pool.run(measure, ranks, shape, *size, options.rounds, timeout_s=900)[0]
            print(f"grid {shape}, hidden {options.hidden}, {options.layers} layers, ", end="")
            print(f"{options.sequences} x {options.length} tokens, load {os.getloadavg()[0]:.1f}")
            for name, times in found.times.items():
                line = f"  {name:32} {times}"
                if name.endswith(COMPILED):
                    line += f", {ratio(found.times[name.removesuffix(COMPILED)], times):.2f} x as fast"
                    line += (
                        f", gradients differ by {found.difference[name]:.0e}, {found.graphs[name]} graphs, "
                    )
                    line += f"{found.breaks[name]} breaks, first step {found.first_step_s[name]:.0f} s"
                print(line, flush=True)


if __name__ == "__main__":
    main()
