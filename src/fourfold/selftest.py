"""Does this machine train exactly? A short parity check on the available devices and backend.

    torchrun --nproc-per-node 8 -m fourfold.selftest
    torchrun --nproc-per-node 8 -m fourfold.selftest --full    # also the main options of the engine, on one grid

Small models take three AdamW steps with clipping on several grids of the running ranks (NCCL on CUDA, Gloo on CPU).
Each rank compares its shards with the stock Hugging Face model, which it trains by itself. The table can be pasted
into a bug report.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fourfold.mesh.agreements import gather_objects
from fourfold.mesh.axes import factorisations
from fourfold.mesh.grid import Grid
from fourfold.mesh.rendezvous import join_world
from fourfold.optim.clip import clip_grad_norm_
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.parallelize import parallelize
from fourfold.train.observe.run_metadata import device_name
from fourfold.weights.api import no_sync
from fourfold.weights.overlap import Overlap

LOSS_BAR = 1e-5  # relative
GRADIENT_BAR = 1e-4  # of the gradient's own largest entry
PARAMETER_BAR = 1e-4  # of the parameter's own largest entry
STEPS = 3
LEARNING_RATE = 1e-3
# Small enough that each matrix of these small models has its own collective.
OVERLAP = Overlap(bundle_bytes=1024)
MAX_NORM = 0.5  # below the norms that occur, so that every step is clipped
# AdamW divides by sqrt(v) + eps. With the usual 1e-8, entries whose true gradient is zero get a full update in the
# direction of their rounding error; with this eps the gradient decides.
EPS = 1e-5
VOCABULARY = 131  # does not divide over any axis

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_FFN: dict[str, Any] = {"intermediate_size": 128, "max_position_embeddings": 64}


_HEADS_OF_16: dict[str, Any] = {**_FFN, "num_key_value_heads": 8, "head_dim": 16}
# The models, as changes of `_SMALL`.
KINDS: dict[str, dict[str, Any]] = {
    # grouped-query attention: at x = 8 the four key/value heads are replicated
    "llama": {**_FFN, "num_key_value_heads": 4},
    # Conv1D, tied, LayerNorm, biases, learned positions
    "gpt2": {"n_inner": 128, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    # norms of q and k
    "qwen3": _HEADS_OF_16,
    # scaled embeddings, 1 + w, soft-capping of attention and logits, sliding windows
    "gemma2": {**_HEADS_OF_16, "sliding_window": 8, "attn_implementation": "eager"},
    # fused QKV with bias, parallel residual
    "gpt_neox": _FFN,
}


# What else a run may use, as arguments of `train_on`.
OPTIONS: dict[str, dict[str, Any]] = {
    "FSDP2's weights": {"weights": "fsdp2"},
    "streamed weights": {"weights": "streamed"},
    "replicated activations": {"activations": "replicated"},
    "selective recomputation": {"activation_checkpointing": "selective"},
    "full recomputation": {"activation_checkpointing": "full"},
    "offloaded inputs": {"activation_checkpointing": "full", "activation_offloading": True},
    "all logits at once": {"chunked_loss": False},
    "gradients whole": {"micro_batches": 2},
    "gradients in shards": {"micro_batches": 2, "accumulation": "sharded"},
    "compiled blocks": {"compile": True},
    "compiled, selective, in shards": {
        "compile": True,
        "activation_checkpointing": "selective",
        "micro_batches": 2,
        "accumulation": "sharded",
    },
}


def build(kind: str) -> nn.Module:
    """A small model with random weights, the same in every process."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SMALL, **KINDS[kind])
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at 0 and norms at 1, where errors would not show.
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.train()


def batches(sequences: int) -> list[tuple[Tensor, Tensor]]:
    """A batch for each step; every sequence has a different number of masked labels."""
    generator = torch.Generator().manual_seed(2)
    out = []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (sequences, 12), generator=generator)
        labels = ids.clone()
        for row in range(sequences):
            labels[row, : row % 11] = -100
        out.append((ids, labels))
    return out


@dataclass(frozen=True)
class Trained:
    """The results of three steps of the stock model."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


@functools.cache
def reference(stock: Callable[[str], nn.Module], kind: str, sequences: int, device: torch.device) -> Trained:
    """Train the stock model in this process alone."""
    model = stock(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    losses, gradients = [], []
    for ids, labels in batches(sequences):
        loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, gradients, {n: p.detach() for n, p in model.named_parameters()})


@dataclass(frozen=True)
class Errors:
    """The largest errors; NaN counts as infinite."""

    loss: float
    gradient: float
    parameter: float
    worst_gradient: str = ""

    def within_bars(self) -> bool:
        return self.loss <= LOSS_BAR and self.gradient <= GRADIENT_BAR and self.parameter <= PARAMETER_BAR

    @staticmethod
    def worst(errors: list[Errors]) -> Errors:
        return Errors(
            max(e.loss for e in errors),
            max(e.gradient for e in errors),
            max(e.parameter for e in errors),
            max(errors, key=lambda e: e.gradient).worst_gradient,
        )


def _relative(ours: Tensor, shard: Tensor, full: Tensor) -> float:
    """The largest difference in this shard, relative to the largest entry of the full tensor."""
    if not shard.numel():
        return 0.0
    error = float((ours - shard).abs().max() / full.abs().max())
    return error if error == error else float("inf")


def train_on(
    grid: Grid,
    kind: str,
    *,
    micro_batches: int = 1,
    stock: Callable[[str], nn.Module] = build,
    **options: Any,
) -> Errors:
    """Train on the grid, with options of `parallelize`; the errors of this rank's shards against the ``stock`` model."""
    sequences = grid.data * grid.z * grid.y * grid.x * micro_batches
    expected = reference(stock, kind, sequences, grid.device)
    model = build(kind)
    report = parallelize(model, grid, **({"overlap": OVERLAP} | options))
    optimizer = sharded_optimizer(torch.optim.AdamW)(
        model.parameters(), lr=LEARNING_RATE, eps=EPS, foreach=True
    )
    parameters = {n: (p, report.layouts[n]) for n, p in model.named_parameters()}
    loss_error, parameter_error = 0.0, 0.0
    gradients = dict.fromkeys(parameters, 0.0)
    for step, (ids, labels) in enumerate(batches(sequences)):
        rows = grid.local_rows(sequences)
        # The tokens of all micro-batches together; of one alone the model counts them.
        count = (
            {"num_items_in_batch": (labels[:, 1:] != -100).sum().to(grid.device)} if micro_batches > 1 else {}
        )
        parts = list(zip(ids[rows].chunk(micro_batches), labels[rows].chunk(micro_batches), strict=True))
        loss = torch.zeros((), device=grid.device)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else no_sync(model):
                own_ids, own_labels = (tensor.to(grid.device) for tensor in part)
                own = model(input_ids=own_ids, labels=own_labels, **count).loss
                own.backward()
                loss += own.detach()
        clip_grad_norm_(model.parameters(), MAX_NORM, grid)
        error = abs(loss.item() - expected.losses[step]) / abs(expected.losses[step])
        loss_error = max(loss_error, error if error == error else float("inf"))
        for name, (parameter, layout) in parameters.items():
            full = expected.gradients[step][layout.hf_name]
            shard = layout.of(full, layout.shard(grid))
            local = cast(DTensor, parameter.grad).to_local()
            gradients[name] = max(gradients[name], _relative(local, shard, full))
        optimizer.step()
        optimizer.zero_grad()
    for parameter, layout in parameters.values():
        full = expected.parameters[layout.hf_name]
        local = cast(DTensor, parameter.detach()).to_local()
        error = _relative(local, layout.of(full, layout.shard(grid)), full)
        parameter_error = max(parameter_error, error)
    worst = max(gradients, key=gradients.__getitem__)
    return Errors(loss_error, gradients[worst], parameter_error, worst)


def grids_of(ranks: int) -> list[tuple[int, int, int, int]]:
    """A few grids that shard every axis, alone and as many at once as the ranks allow."""
    # The small models have 8 heads for x and 64 hidden features for y.
    every = [f for f in factorisations(ranks) if 8 % f[3] == 0 and 64 % f[2] == 0]
    sharded = {f: sum(size > 1 for size in f) for f in every}
    alone = [f for f in every if sharded[f] == 1]
    # Among those that shard the most axes, the most even first: (1, 2, 2, 2) before (1, 1, 2, 4).
    mixed = sorted((f for f in every if sharded[f] == max(sharded.values()) > 1), key=max)
    return [*alone, *mixed[:4]] or every


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["llama", "gpt2"],
        choices=list(KINDS),
        help="models to test (default: llama gpt2)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device type (default: cuda if available)")
    parser.add_argument(
        "--full",
        action="store_true",
        help="also test the main options of the engine, on a grid with as many axes as possible",
    )
    options = parser.parse_args(arguments)

    start_s = time.perf_counter()
    join_world(options.device, timeout_s=120)
    # fp32 on GPUs as well; with TF32 its rounding would be tested, not Fourfold.
    torch.set_float32_matmul_precision("highest")
    table = Table("model", "(data, z, y, x)", "with", "loss", "gradient", "parameter", "verdict")
    good = total = 0
    shapes = grids_of(dist.get_world_size())
    asked: list[tuple[tuple[int, int, int, int], str]] = [(shape, "") for shape in shapes]
    if options.full:
        most = max(shapes, key=lambda shape: sum(size > 1 for size in shape))
        asked += [(most, name) for name in OPTIONS]
    for kind in options.models:
        for shape, name in asked:
            grid = Grid.create(shape, device_type=options.device, timeout_s=120)
            given = OPTIONS.get(name, {})
            if (why := _why_not_tried(given, grid.device.type)) is not None:
                table.add_row(kind, str(shape), name, "", "", "", f"not tried: {why}")
                continue
            errors = Errors.worst(gather_objects(train_on(grid, kind, **given)))
            total += 1
            good += errors.within_bars()
            verdict = "exact" if errors.within_bars() else f"NOT EXACT, worst in {errors.worst_gradient}"
            cells = (f"{e:.1e}" for e in (errors.loss, errors.gradient, errors.parameter))
            table.add_row(kind, str(shape), name, *cells, verdict)
    if dist.get_rank() == 0:
        device = device_name(grid.device)
        print(f"ranks        {dist.get_world_size()} on {device}, backend {dist.get_backend()}")
        versions = f"{torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"
        print(f"torch        {versions}")
        print(f"python       {platform.python_version()} on {platform.platform()}")
        Console(width=130).print(table)
        print(
            f"thresholds: loss {LOSS_BAR:g}, gradient {GRADIENT_BAR:g}, parameter {PARAMETER_BAR:g}; fp32, {STEPS} AdamW steps"
        )
        print(f"selftest: {good}/{total} exact, {time.perf_counter() - start_s:.0f} s", flush=True)
    dist.destroy_process_group()
    return 0 if good == total else 1


def _why_not_tried(given: dict[str, Any], device: str) -> str | None:
    if device == "cpu" and given.get("activation_offloading"):
        return "it has no effect on CPUs"
    has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    return (
        "there is no C++ compiler" if device == "cpu" and given.get("compile") and not has_compiler else None
    )


if __name__ == "__main__":
    sys.exit(main())
