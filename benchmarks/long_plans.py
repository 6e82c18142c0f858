"""Long sequences that others trained, beside the planner's prediction: a table for docs/verification/planner-accuracy.md.

    python -m benchmarks.long_plans

Predicted with the preset dgx-h100 and default kernels, which were fitted to software with shorter sequences; nothing here is fitted. A row
has the published layout where ranks along z can be it, whether it fits or not, and the best layout of the plan.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.dry_run_estimate import schedule_of
from fourfold.planner.inputs.cluster import preset
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import from_config
from fourfold.planner.plan import plan

CLUSTER = "dgx-h100"
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
QWEN3_8B = LLAMA_8B | {
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
}
M = 2**20


class Case(NamedTuple):
    name: str
    config: dict[str, Any]
    gpus: int
    sequences: int
    length: int
    published: str
    layout: Layout | None  # the published one, or the nearest that there is


def by_z(z: int, share: int, kind: Any = "full") -> Layout:
    return Layout(1, z, 1, 1, 1, kind, sequence_ranks=share)


CASES = (
    Case(
        "Qwen3-8B", QWEN3_8B, 8, 1, M, "380 s, 56 GB a GPU, offloaded to the CPU (TRL, trl#6846)", by_z(8, 8)
    ),
    Case("Qwen3-8B", QWEN3_8B, 16, 1, 2 * M, "696 s (TRL, trl#6845)", by_z(16, 16)),
    Case("Qwen3-8B", QWEN3_8B, 32, 1, 4 * M, "1,346 s (TRL, trl#6845)", by_z(32, 32)),
    Case(
        "Llama-3.1-8B",
        LLAMA_8B,
        8,
        2,
        M // 8,
        "30.6 s: 1,071 tokens/s/GPU, 84 GiB, CP 4 x FSDP 2, float8, on 96 GB (torchtitan, docs/performance.md)",
        by_z(8, 4),
    ),
    Case(
        "Llama-3.1-8B",
        LLAMA_8B,
        8,
        1,
        M // 4,
        "59.8 s: 548 tokens/s/GPU, 84.5 GiB, CP 8, float8, on 96 GB (torchtitan, docs/performance.md)",
        by_z(8, 8),
    ),
    Case(
        "Llama-3.1-405B",
        LLAMA_405B,
        16384,
        128,
        M // 8,
        "38 % MFU: 380 TFLOP/s/GPU, TP 8 x CP 16 x PP 16 x DP 8 (arXiv:2407.21783, table 4)",
        None,
    ),
    Case("Llama-3.1-8B", LLAMA_8B, 64, 1, M, "", None),
    Case("Llama-3.1-405B", LLAMA_405B, 1024, 1, M, "", None),
)


def in_words(found: Estimate) -> str:
    gib = found.memory.total_bytes / 2**30
    parts = {**found.compute_s, **{axis: s for axis, s in found.exposed_s.items()}}
    limits = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
    shares = ", ".join(f"{name} {parts[name] / found.step_s:.0%}" for name in limits)
    mfu = "" if found.mfu is None else f", {found.mfu:.1%} MFU"
    return f"{found.layout}: {found.step_s:.1f} s{mfu}; {gib:.0f} GiB; {shares}"


def row(case: Case) -> tuple[str, ...]:
    cluster = preset(CLUSTER)
    asked = f"{case.name}, {case.gpus:,} x H100, {case.sequences} x {case.length:,}"
    theirs = "–"
    if case.layout is not None:
        prices = Prices(from_config(case.config), cluster, case.length, schedule_of(cluster, "bf16"))
        theirs = in_words(estimate_with(prices, case.layout, case.sequences))
    found = plan(
        case.config,
        cluster,
        case.gpus,
        sequences=case.sequences,
        length=case.length,
        sequence_ranks="auto",
        quiet=True,
    )
    best = in_words(found.best) if found.ranked else f"none fits: {found.nearest_miss().reason.split(';')[0]}"
    return asked, case.published or "–", theirs, best


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    headings = ("case", "published", "predicted, that layout, full recomputation", "predicted, plan's best")
    print(f"| {' | '.join(headings)} |")
    print("|" + " --- |" * len(headings))
    for case in CASES:
        print(f"| {' | '.join(row(case))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
