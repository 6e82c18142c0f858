"""How much host time does a transformer block take?

On a GPU the host has to start the kernels of a block in less time than they run. Here the arithmetic is next to nothing
(hidden 64 and a few tokens; with 256 it was a third of a compiled block's time), and nothing is sent (the `fake` back end).
So what is measured is the host: CPU time of forward and backward of one Llama block in fp32, the difference between a model
of 10 blocks and one of 2. Each way has a process of its own; they are measured in turns, and a ratio is the median of those
of the rounds.

    stock                        the Hugging Face block
    FSDP2                        bare `fully_shard` over 2 ranks
    FSDP2 + TP + SP              bare `fully_shard` over 2 ranks and `parallelize_module` with sequence parallelism over 2
    Fourfold (data, z, y, x)     with the weights that a GPU gets
    compiled (data, z, y, x)     the same with compiled blocks, by Inductor; needs a C++ compiler
    AdamW                        a step of fused AdamW on plain tensors of the sizes of the shards on (1,2,2,2)
    sharded AdamW                the same on the shards

    python -m benchmarks.host
    python -m benchmarks.host --profile "Fourfold (1,2,2,2)"
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

FEW, MANY = 2, 10
STEPS = 10
ROUNDS = 9
FSDP2, TENSOR = "FSDP2", "FSDP2 + TP + SP"
PLAIN, SHARDED = "AdamW", "sharded AdamW"
GRIDS = ((1, 1, 1, 1), (1, 2, 1, 1), (1, 2, 1, 2), (1, 2, 2, 2))
# way: (what it is compared with, the threshold)
THRESHOLDS = {
    "Fourfold (1,1,1,1)": ("stock", 1.05),
    "Fourfold (1,2,1,1)": (FSDP2, 1.05),
    "Fourfold (1,2,1,2)": (TENSOR, 0.8),
    "Fourfold (1,2,2,2)": ("Fourfold (1,2,1,2)", 1.25),
    "compiled (1,2,1,2)": ("Fourfold (1,2,1,2)", 0.65),
    "compiled (1,2,2,2)": ("Fourfold (1,2,2,2)", 0.65),
    SHARDED: (PLAIN, 1.2),
}
WAYS = ("stock", FSDP2, TENSOR, PLAIN, *THRESHOLDS)


def build(way: str, layers: int) -> Callable[[], None]:
    """Forward and backward of a model of so many blocks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=256,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if way == FSDP2:
        _fully_shard(model, _mesh((2,), ("z",)))
    elif way == TENSOR:
        mesh = _mesh((2, 2), ("z", "x"))
        _tensor_parallel(model, mesh["x"])
        _fully_shard(model, mesh["z"])
    elif way in (PLAIN, SHARDED):
        _fourfold(model, (1, 2, 2, 2))
    elif way != "stock":
        kind, _, sizes = way.rstrip(")").partition(" (")
        _fourfold(model, tuple(int(size) for size in sizes.split(",")), compile=kind == "compiled")
    ids, positions = torch.randint(256, (4, 16)), torch.arange(16).expand(4, 16)

    def step() -> None:
        model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    if way not in (PLAIN, SHARDED):
        return step
    optimizer = _optimizer(model, is_sharded=way == SHARDED)
    model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    for group in optimizer.param_groups if way == PLAIN else ():
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def _optimizer(model: Any, *, is_sharded: bool) -> Any:
    import torch

    import fourfold as ff

    options: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if is_sharded:
        return ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), **options)
    plain = [torch.nn.Parameter(p.detach().to_local().clone()) for p in model.parameters()]
    return torch.optim.AdamW(plain, **options)


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    import math

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    # The store of the `fake` back end has no public name (torch 2.13.0).
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _fully_shard(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Any, mesh: Any) -> None:
    """The plan of torchtitan's Llama: tokens are sharded between the blocks' linears."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    tokens, everywhere = Shard(1), Replicate()
    block = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens},
            desired_input_kwarg_layouts={"hidden_states": everywhere},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(everywhere,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, block)
        layer.self_attn.config.num_attention_heads = 8
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=everywhere, output_layouts=tokens),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=everywhere),
    }
    parallelize_module(model, mesh, ends)


def _fourfold(model: Any, shape: tuple[int, ...], **options: Any) -> None:
    import torch

    import fourfold as ff
    from fourfold.mesh.axes import AXES
    from fourfold.mesh.grid import Grid

    grid = Grid.from_mesh(_mesh(shape, AXES), torch.device("cpu"), target="cuda")
    ff.parallelize(model, grid, **options)


def block_ms(few: Callable[[], None], many: Callable[[], None]) -> float:
    """CPU time of one block: the least of some steps, in turns, because what else the machine does only adds."""
    times: dict[Callable[[], None], list[float]] = {few: [], many: []}
    for _ in range(STEPS):
        for step, found in times.items():
            start_s = time.thread_time()
            step()
            found.append(time.thread_time() - start_s)
    return 1e3 * (min(times[many]) - min(times[few])) / (MANY - FEW)


def serve(way: str) -> None:
    """Measure once for each line that comes in."""
    import torch

    torch.set_num_threads(1)
    few, many = build(way, FEW), build(way, MANY)
    for _ in range(3):
        few(), many()
    print("ready", flush=True)
    for _ in sys.stdin:
        gc.collect()
        gc.disable()  # a collection counts the objects of all that was imported
        print(block_ms(few, many), flush=True)
        gc.enable()


def profile(way: str) -> None:
    import torch

    torch.set_num_threads(1)
    step = build(way, MANY)
    for _ in range(3):
        step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--profile", choices=WAYS, help="where the host time of one way goes")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
        return 0
    if options.profile:
        profile(options.profile)
        return 0
    workers = {}
    for way in options.only:
        command = [sys.executable, "-m", "benchmarks.host", "--serve", way]
        workers[way] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert _answer(workers[way]) == "ready"
    times: dict[str, list[float]] = {way: [] for way in workers}
    for _ in range(options.rounds):
        for way, worker in workers.items():
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            times[way].append(float(_answer(worker)))
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    return report(times)


def _answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def report(times: dict[str, list[float]]) -> int:
    """Print the figures; returns 1 if a threshold was not reached."""
    held = 0
    judged = 0
    for way, each in times.items():
        median = statistics.median(each)
        spread = (max(each) - min(each)) / median / 2
        line = f"{way:20} {median:7.2f} ms ±{spread:4.1%}"
        other, threshold = THRESHOLDS.get(way, ("", 0.0))
        if other in times:
            ratios = sorted(a / b for a, b in zip(each, times[other], strict=True))
            ratio = statistics.median(ratios)
            judged += 1
            held += ratio <= threshold
            verdict = "holds" if ratio <= threshold else "FAILED"
            line += f"   {ratio:.3f} x {other} ({ratios[0]:.3f} to {ratios[-1]:.3f}), at most {threshold}: {verdict}"
        print(line)
    print(
        f"host: {held}/{judged} thresholds hold; {len(next(iter(times.values())))} rounds, torch on one thread"
    )
    return 0 if held == judged else 1


if __name__ == "__main__":
    sys.exit(main())
