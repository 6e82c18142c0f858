"""Does the planner predict what others measured with mixtures of experts, and does it choose as it should?

    python -m benchmarks.published_experts
    python -m benchmarks.published_experts --markdown    # the tables of docs/verification/planner-accuracy.md
    python -m benchmarks.published_experts --deepseek    # also the search for DeepSeek-V3 on 2,048 H800, in minutes

Published steps without pipeline stages, in bf16: FSDP of experts, and FSDP with expert parallelism, of Megatron-Core (arXiv 2504.14960,
tables 1 and 3: 256 x 4,096 tokens, micro-batches of one sequence), and gpt-oss-120b of Megatron-Bridge's performance summary. Two figures are fitted
on one half of the rows, by the hash of their names: how much of the best matmul the grouped ones reach, and the share of the network; errors
are those of the other half. Fourfold's layouts say it so: EP of 8 with FSDP is x = 8 whose ranks own experts, with as many sequences in a
micro-batch as the published ranks have together; attention, which has another tensor degree there, is a small part of these steps.

Every figure of the plan is a prediction; no GPU has run Fourfold.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.published import Figures, with_library
from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.inputs.cluster import Cluster, preset
from fourfold.planner.inputs.experts import Experts, Latent
from fourfold.planner.inputs.layout import FOURFOLD, Layout, Schedule
from fourfold.planner.inputs.workload import Workload
from fourfold.planner.search import search

MEDIAN_BAR = 0.20
LENGTH, SEQUENCES = 4096, 256
# Megatron's FSDP reduces gradients over its ranks in every micro-batch.
_FSDP = Schedule(sends_every_micro_batch=True)
_MCORE = Schedule(optimizer_over_data=True)

MIXTRAL = Workload("Mixtral-8x22B", 6144, 16384, 56, 48, 8, 128, 32768, experts=Experts(8, 2, 16384))
FINE = Workload("Mixtral-8x22B-G8T8", 6144, 2048, 56, 48, 8, 128, 32768, experts=Experts(64, 8, 2048))
QWEN2_57B = Workload(
    "Qwen2-57B-A14B", 3584, 18944, 28, 28, 4, 128, 151936, qkv_bias=True, experts=Experts(64, 8, 2560, 20480)
)
QWEN3_30B = Workload("Qwen3-30B-A3B", 2048, 6144, 48, 32, 4, 128, 151936, experts=Experts(128, 8, 768))
GPT_OSS = Workload(
    "gpt-oss-120b", 2880, 2880, 36, 64, 8, 64, 201088, qkv_bias=True, experts=Experts(128, 4, 2880, bias=True)
)
DEEPSEEK_V3 = Workload(
    "DeepSeek-V3", 7168, 18432, 61, 128, 128, 192, 129280,
    experts=Experts(256, 8, 2048, 2048, 3, wide_weights=True), latent=Latent(1536, 512, 64, 128, 128),
)  # fmt: skip


def _h800() -> Cluster:
    """H100 whose NVLink has 200 GB/s each way instead of 450."""
    cluster = preset("dgx-h100")
    links = dataclasses.replace(cluster.links, device_gbps=200, measured_gbps=())
    return dataclasses.replace(cluster, name="dgx-h800", links=links)


H800 = _h800()
Kind = Literal["FSDP", "FSDP+EP", "EP"]


@dataclass(frozen=True)
class Row:
    workload: Workload
    published_layout: str
    kind: Kind
    cluster: Cluster
    layout: Layout
    schedule: Schedule
    sequences: int
    measured: float
    quantity: Literal["MFU", "tokens/s/GPU"]

    @property
    def id(self) -> str:
        return (
            f"{self.workload.name}, {self.layout.ranks} {self.cluster.device.name}, {self.published_layout}"
        )

    @property
    def is_fitted(self) -> bool:
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 0

    def predict(self, figures: Figures) -> float:
        """The published quantity."""
        cluster = with_library(self.cluster, node_share=figures.node_share)
        prices = Prices(self.workload, cluster, LENGTH, self.schedule, figures.kernels())
        found = estimate_with(prices, self.layout, self.sequences)
        assert found.mfu is not None
        return found.mfu if self.quantity == "MFU" else found.tokens_per_s / self.layout.ranks


def _fsdp(workload: Workload, ranks: int, tensor: int, published: str, mfu: float) -> Row:
    layout = Layout(
        1, ranks // tensor, 1, tensor, SEQUENCES // (ranks // tensor), activations="sequence-parallel"
    )
    return Row(workload, published, "FSDP", preset("dgx-h100"), layout, _FSDP, SEQUENCES, mfu, "MFU")


def _with_ep(workload: Workload, ranks: int, tensor: int, published: str, mfu: float) -> Row:
    """EP of 8 inside a node; the published data-parallel ranks take a sequence each."""
    micro_batches = SEQUENCES // (ranks // tensor)
    layout = Layout(*(1, ranks // 8, 1, 8, micro_batches), activations="sequence-parallel", experts=("x",))
    return Row(workload, published, "FSDP+EP", preset("dgx-h100"), layout, _FSDP, SEQUENCES, mfu, "MFU")


def _gpt_oss(cluster: str, name: str, over: int, tokens: float) -> Row:
    machine = preset(cluster)
    layout = Layout(64 // over, over, 1, 1, 4, experts=("z",))
    return Row(
        GPT_OSS, f"{name}, EP {over}, PP 1", "EP", machine, layout, _MCORE, 1024, tokens, "tokens/s/GPU"
    )


ROWS = (
    _fsdp(MIXTRAL, 128, 8, "FSDP, TP 8", 0.043),
    _with_ep(MIXTRAL, 128, 2, "FSDP, TP 2, EP 8", 0.234),
    _fsdp(QWEN2_57B, 64, 2, "FSDP, TP 2", 0.099),
    _with_ep(QWEN2_57B, 64, 1, "FSDP, EP 8", 0.254),
    _fsdp(FINE, 128, 8, "FSDP, TP 8", 0.022),
    _with_ep(FINE, 128, 4, "FSDP, TP 4, EP 8", 0.090),
    _gpt_oss("gb200-nvl72", "GB300", 64, 18347),
    _gpt_oss("gb200-nvl72", "GB200", 64, 15876),
    _gpt_oss("dgx-b200", "B200", 8, 13568),
)


def error(row: Row, figures: Figures) -> float:
    """Of the step: positive where the planner says too long."""
    return row.measured / row.predict(figures) - 1


def fit(rows: Sequence[Row]) -> Figures:
    """The least sum of logarithmic errors on a grid of the two figures."""
    shares = [0.05 * step for step in range(4, 21)]

    def total(figures: Figures) -> float:
        return sum(max(row.measured / (p := row.predict(figures)), p / row.measured) for row in rows)

    return min(
        (
            Figures(matmul_share=m, memory_passes=1.0, host_us=0.0, node_share=n)
            for m in shares
            for n in shares
        ),
        key=total,
    )


def ordered(figures: Figures) -> dict[str, bool]:
    """Is FSDP with expert parallelism faster than FSDP alone, as published, in each model?"""
    found = {}
    for name in dict.fromkeys(row.workload.name for row in ROWS if row.kind == "FSDP"):
        fsdp, ep = (
            next(r for r in ROWS if r.workload.name == name and r.kind == kind)
            for kind in ("FSDP", "FSDP+EP")
        )
        found[name] = fsdp.predict(figures) < ep.predict(figures)
    return found


# -- where the plan changes from owned to cut ---------------------------------------------------------------------------


def crossing_tokens(workload: Workload, micro_batches: int) -> float:
    """T* = 1.5 (1 + 1/n) E f / k: tokens of a micro-batch from which gathered weights are fewer bytes than rows."""
    e = workload.experts
    assert e is not None
    return 1.5 * (1 + 1 / micro_batches) * e.number * e.features / e.chosen


def bytes_on_z(workload: Workload, tokens: float, micro_batches: int, *, owned: bool) -> float:
    """That the experts of a layer send on z in a micro-batch, for each (z-1)/z, by what the formulas price."""
    e = workload.experts
    assert e is not None
    if owned:
        return 4 * 2.0 * e.rows(tokens) * workload.hidden
    return 2.0 * workload.expert_elements * 2 + 4.0 * workload.expert_elements / micro_batches


def on_z_s(
    workload: Workload, cluster: Cluster, ranks: int, tokens: float, *, owned: bool
) -> tuple[float, float]:
    """(link, step) seconds on z, with one micro-batch of so many tokens on each rank."""
    sequences = round(tokens / LENGTH) * ranks
    prices = Prices(workload, cluster, LENGTH, dataclasses.replace(FOURFOLD, elementwise="eager"))
    layout = Layout(1, ranks, 1, 1, experts=("z",) if owned else "cut")
    found = estimate_with(prices, layout, sequences)
    return found.link_s["z"], found.step_s


def crossing(workload: Workload, cluster: Cluster, ranks: int, which: int) -> float:
    """The tokens at which owned experts stop to take less: link seconds on z (0), or the step (1)."""
    low, high = LENGTH, 1024 * LENGTH

    def wins(tokens: float) -> bool:
        owned, cut = (on_z_s(workload, cluster, ranks, tokens, owned=o)[which] for o in (True, False))
        return owned < cut

    if not wins(low):
        return 0.0
    while high - low > LENGTH:
        middle = (low + high) // 2 // LENGTH * LENGTH
        low, high = (middle, high) if wins(middle) else (low, middle)
    return float(low)


# -- DeepSeek-V3 on 2,048 H800 ------------------------------------------------------------------------------------------

DEEPSEEK_SEQUENCES = 16384


@dataclass(frozen=True)
class DeepSeek:
    owned: Estimate  # over z, or z and x: not gathered
    over_x: Estimate
    cut: Estimate
    in_halves: Estimate  # the first, with streamed weights and half-batches that alternate
    at_128: str  # why 128 owners cannot

    @staticmethod
    def search() -> DeepSeek:
        prices = Prices(DEEPSEEK_V3, H800, LENGTH, dataclasses.replace(FOURFOLD, elementwise="compiled"))
        plan = search(prices, 2048, DEEPSEEK_SEQUENCES)
        owned = next(e for e in plan.ranked if "z" in e.layout.experts)
        over_x = next(e for e in plan.ranked if e.layout.experts == ("x",))
        cut = next(e for e in plan.ranked if e.layout.experts == "cut")
        too_few = [
            r
            for r in plan.rejected
            if r.layout.experts != "cut" and r.layout.z * r.layout.y * r.layout.x == 128 and r.over_bytes
        ]
        alternates = dataclasses.replace(prices.schedule, interleaves=True)
        layout = dataclasses.replace(owned.layout, weights="streamed")
        in_halves = estimate_with(
            dataclasses.replace(prices, schedule=alternates), layout, DEEPSEEK_SEQUENCES
        )
        reason = min(too_few, key=lambda r: r.over_bytes).reason
        return DeepSeek(owned, over_x, cut, in_halves, reason)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: float, row: Row) -> str:
    return f"{value:.1%}" if row.quantity == "MFU" else f"{value:,.0f} tokens/s/GPU"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables alone")
    parser.add_argument("--deepseek", action="store_true", help="also search for DeepSeek-V3 on 2,048 H800")
    options = parser.parse_args(arguments)
    figures = fit([row for row in ROWS if row.is_fitted])
    held_out = [row for row in ROWS if not row.is_fitted]
    median = statistics.median(abs(error(row, figures)) for row in held_out)
    rows: list[list[Any]] = [
        [
            row.id,
            "fitted" if row.is_fitted else "held out",
            _shown(row.measured, row),
            _shown(row.predict(figures), row),
            f"{error(row, figures):+.0%}",
        ]
        for row in ROWS
    ]
    print(_table(("run", "part", "published", "predicted", "error of the step"), rows))
    crossings = []
    for workload, ranks in ((QWEN3_30B, 16), (MIXTRAL, 8), (DEEPSEEK_V3, 256)):
        tokens = [
            crossing_tokens(workload, 1),
            *(crossing(workload, preset("dgx-h100"), ranks, i) for i in (0, 1)),
        ]
        crossings.append([f"{workload.name}, z = {ranks}", *(f"{t:,.0f}" for t in tokens)])
    print()
    print(_table(("model", "T* by bytes", "predicted: link time of z", "predicted: step"), crossings))
    keeps = ordered(figures)
    if options.deepseek:
        found = DeepSeek.search()
        for name, one in (
            ("owned over z", found.owned),
            ("owned over x", found.over_x),
            ("gathered", found.cut),
            ("owned over z, half-batches alternate", found.in_halves),
        ):
            print(
                f"DeepSeek-V3, {name}: {one.layout}: {one.step_s:.2f} s, {one.memory.total_bytes / 2**30:.1f} GiB, limited by "
                f"{one.limited_by}; link z {one.link_s['z']:.1f} s, exposed {one.exposed_s['z']:.1f} s"
            )
        print(f"DeepSeek-V3, experts on 128 ranks: {found.at_128}")
        is_rejected = found.cut.step_s > min(found.owned.step_s, found.over_x.step_s)
        print(
            f"published_experts: gathered experts of DeepSeek-V3 are not chosen: {'met' if is_rejected else 'MISSED'}"
        )
    if not options.markdown:
        print(f"fitted: matmul_share {figures.matmul_share:.2f}, node_share {figures.node_share:.2f}")
        print(
            f"published_experts: held-out median {median:.1%}, bar {MEDIAN_BAR:.0%}: {'met' if median <= MEDIAN_BAR else 'MISSED'}"
        )
        print(f"published_experts: FSDP < FSDP+EP: {keeps}")
    return 0 if median <= MEDIAN_BAR and all(keeps.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
