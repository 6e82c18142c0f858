"""Does a rank that loads a checkpoint ever hold more than its own part?

A Llama checkpoint of more than 400 MB is written, then eight ranks build the model on meta and load it onto
(1, 2, 2, 2). The peak of each rank's resident memory may rise by its own shard, the largest single tensor's shard and
50 MB for all else (Python objects of the model, staging buffers, process groups).

With `--loss`: the peak of a step with a vocabulary of 128k, with the loss of all logits at once and by chunks, measured on two
ranks; and dry runs of an 8B rank with 8k and with 131k tokens, every block recomputed.

    python -m benchmarks.memory
    python -m benchmarks.memory --loss
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.measure import llama
from benchmarks.ranks import RankPool
from fourfold.config.describe import sized_model_config
from fourfold.dry_run.run import dryrun
from fourfold.mesh.grid import Grid
from fourfold.parallel.parallelize import parallelize
from fourfold.weights.overlap import Overlap

GRID = (1, 2, 2, 2)
MARGIN_MB = 50.0
MB = 1e6


@dataclass(frozen=True)
class Use:
    rise_mb: float
    shard_mb: float
    largest_mb: float
    checksum: float

    @property
    def limit_mb(self) -> float:
        return self.shard_mb + self.largest_mb + MARGIN_MB


def resident_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (the most since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / MB
    raise RuntimeError(f"{field} is not in /proc/self/status")


def load_rank(folder: Path) -> Use:
    grid = Grid.create(GRID, timeout_s=120)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's way to reset VmHWM
    before_mb = resident_mb("VmRSS")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    parallelize(model, grid, checkpoint=folder)
    rise_mb = resident_mb("VmHWM") - before_mb
    shards = [p.to_local() for p in model.parameters()]
    sizes_mb = [s.numel() * s.element_size() / MB for s in shards]
    return Use(rise_mb, sum(sizes_mb), max(sizes_mb), sum(float(s.double().sum()) for s in shards))


# -- the loss ---------------------------------------------------------------------------------------------------------

VOCABULARY = 128_256
LENGTHS = (1024, 4096)  # of a rank's one sequence
MOST_OF_WHOLE = 0.5  # of the rise with all logits
# (title, grid, sequences, length, GiB at most)
DRY_RUNS = (
    ("8B on z=8, 8,192 tokens a rank", (1, 8, 1, 1), 8, 8192, 17.0),
    ("8B on z=8, x=8, 131,072 tokens a rank", (1, 8, 1, 8), 8, 131_072, 12.0),
)
# Each dry run is repeated with inputs of linears gathered again in backward, with block inputs on the host, and with moments in bf16.
WAYS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "inputs gathered again": {"overlap": Overlap(keep_inputs=False)},
    "inputs offloaded": {"activation_offloading": True},
    "adamw-bf16": {"optimizer": "adamw-bf16"},
    "both": {"optimizer": "adamw-bf16", "activation_offloading": True},
}


def step_rise_mb(is_chunked: bool, length: int) -> float:
    """How far the resident memory of a rank rises in a step."""
    grid = Grid.create((1, 2, 1, 1), timeout_s=300)
    torch.manual_seed(0)
    config = llama(hidden=128, layers=1, heads=4, vocabulary=VOCABULARY)
    model = LlamaForCausalLM(config)
    parallelize(model, grid, weights="fsdp2", precision="bf16", chunked_loss=is_chunked)
    ids = torch.randint(VOCABULARY, (2, length))[grid.local_rows(2)]
    rise_mb = 0.0
    for _ in range(2):  # the first one also allocates what stays
        Path("/proc/self/clear_refs").write_text("5")
        before_mb = resident_mb("VmRSS")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        rise_mb = resident_mb("VmHWM") - before_mb
        model.zero_grad()
    return rise_mb


def loss() -> int:
    ratios = {}
    for length in LENGTHS:
        rises_mb = {}
        for is_chunked in (False, True):
            with RankPool(2) as pool:
                rises_mb[is_chunked] = max(pool.run(step_rise_mb, 2, is_chunked, length, timeout_s=600))
        ratios[length] = rises_mb[True] / rises_mb[False]
        print(
            f"vocabulary {VOCABULARY:,}, {length:,} tokens a rank, bf16: a step needs {rises_mb[False]:.0f} MB with all logits, "
            f"{rises_mb[True]:.0f} MB by chunks, {ratios[length]:.2f} of it; at most {MOST_OF_WHOLE}",
            flush=True,
        )
    config = sized_model_config("8b", VOCABULARY) | {"max_position_embeddings": 131_072}
    held = 0
    cases = list(product(DRY_RUNS, WAYS.items()))
    for (title, shape, sequences, length, limit_gib), (way, options) in cases:
        peak = dryrun(
            config, shape, sequences=sequences, length=length, activation_checkpointing="full", **options
        ).peak
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in peak.by_category.items() if size)
        held += peak.bytes / 2**30 <= limit_gib
        print(
            f"dry run of {title}, {way}: {peak.bytes / 2**30:.2f} GiB, at most {limit_gib:g} ({parts})",
            flush=True,
        )
    of_whole = ", ".join(f"{ratio:.2f} ({length:,} tokens)" for length, ratio in ratios.items())
    print(f"loss: by chunks {of_whole} of the memory; {held}/{len(cases)} dry runs within their limits")
    return 0 if max(ratios.values()) <= MOST_OF_WHOLE and held == len(cases) else 1


# -- loading ----------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", action="store_true", help="the memory of the loss instead")
    if parser.parse_args(arguments).loss:
        return loss()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        config = llama(hidden=1024, layers=8, heads=16, vocabulary=16_000, kv_heads=8)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder, max_shard_size="200MB")
        checksum = sum(float(p.detach().double().sum()) for p in model.parameters())
        files = sorted(folder.glob("*.safetensors"))
        size_mb = sum(f.stat().st_size for f in files) / MB
        del model
        print(f"checkpoint: {size_mb:.0f} MB in {len(files)} files; 8 ranks on (data, z, y, x) = {GRID}")
        with RankPool(8) as pool:
            uses: list[Use] = pool.run(load_rank, 8, folder, timeout_s=300)
    for rank, use in enumerate(uses):
        print(
            f"rank {rank}: resident memory rose by {use.rise_mb:6.1f} MB; limit {use.limit_mb:6.1f} MB = shard "
            f"{use.shard_mb:.1f} + largest tensor's shard {use.largest_mb:.1f} + {MARGIN_MB:.0f}"
        )
    # Norms are replicated on x: 17 vectors counted twice, all ones when fresh.
    twice = (2 * config.num_hidden_layers + 1) * config.hidden_size
    right = abs(sum(u.checksum for u in uses) - twice - checksum) < 1e-6 * max(1.0, abs(checksum))
    print(
        f"sum of all weights: {sum(u.checksum for u in uses) - twice:.6f} on the ranks, {checksum:.6f} in the checkpoint"
    )
    good = right and size_mb >= 400 and all(u.rise_mb <= u.limit_mb for u in uses)
    worst = max(uses, key=lambda u: u.rise_mb - u.limit_mb)
    print(
        f"memory: worst rank rose by {worst.rise_mb:.1f} MB of {worst.limit_mb:.1f} MB allowed, {'within' if good else 'NOT within'} the bar"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
