"""How fast is the search, what does it choose where others have published their choice, and when does y pay?

Layouts per second on one core, over the largest case. Then six well-known cases: the plan's best beside the published
layout and figure, with replicated activations alone, with sequence-parallel ones offered as well, and with compiled blocks too. Then the cases at the limit
of strong scaling, where the second tensor axis may earn its place: the best layout against the best with y = 1, by the whole
predicted step, the same both ways. And published steps of LoRA beside predictions.

    python -m benchmarks.search
    python -m benchmarks.search --markdown    # the tables as they are in docs/verification/planner-accuracy.md
    python -m benchmarks.search --lora        # only: steps of LoRA, published and predicted
    python -m benchmarks.search --dry-run     # a step of one rank of each layout that is chosen for compiled blocks, in minutes

Every figure of the plan is a prediction; no GPU has run Fourfold.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from benchmarks.published_rows import gpt
from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.dry_run_estimate import Job, estimate_in_process
from fourfold.planner.inputs.cluster import Cluster, preset
from fourfold.planner.inputs.layout import FOURFOLD, Activations, Elementwise, Layout
from fourfold.planner.inputs.workload import Workload
from fourfold.planner.search import Plan, search

LAYOUTS_PER_S_BAR = 5000
REPLICATED: tuple[Activations, ...] = ("replicated",)
BOTH: tuple[Activations, ...] = ("replicated", "sequence-parallel")

LLAMA_8B = Workload("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256)
LLAMA_70B = Workload("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256)
LLAMA_405B = Workload("Llama-3.1-405B", 16384, 53248, 126, 128, 8, 128, 128256)
QWEN_7B = Workload("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 128, 152064, qkv_bias=True)
QWEN_32B = Workload("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 128, 152064, qkv_bias=True)
GPT_80B = gpt("GPT-80B", 12288, 42, 96, 50304, tied=True)
GPT_320B = gpt("GPT-320B", 16384, 96, 128, 50304, tied=True)


def nvlink_domains(devices: int) -> Cluster:
    """GB200 in NVLink domains of so many."""
    cluster = preset("gb200-nvl72")
    links = dataclasses.replace(cluster.links, devices_per_node=devices, node_gbps=50.0 * devices)
    return dataclasses.replace(cluster, name=f"gb200-nvl{devices}", links=links)


@dataclass(frozen=True)
class Case:
    workload: Workload
    cluster: Cluster
    ranks: int
    sequences: int
    length: int
    published_layout: str = ""
    published_figure: str = ""
    quantity: str = ""  # in which the published figure is

    @property
    def title(self) -> str:
        return f"{self.workload.name}, {self.ranks:,} × {self.cluster.device.name}, {self.sequences:,} × {self.length:,}"

    def prices(self, elementwise: Elementwise) -> Prices:
        schedule = dataclasses.replace(FOURFOLD, elementwise=elementwise)
        return Prices(self.workload, self.cluster, self.length, schedule)

    def plan(self, activations: tuple[Activations, ...] = BOTH, elementwise: Elementwise = "eager") -> Plan:
        return search(self.prices(elementwise), self.ranks, self.sequences, activations=activations)

    def figure(self, best: Estimate) -> str:
        tokens = float(self.sequences) * self.length
        model = self.workload.model_flops(tokens, self.length) / best.step_s
        assert best.mfu is not None
        assert best.hfu is not None
        hardware = model * best.hfu / best.mfu
        if self.quantity == "tokens":
            return f"{best.tokens_per_s / self.ranks:,.0f} tokens/s/GPU"
        if self.quantity == "model":
            return f"{model / self.ranks / 1e12:.0f} TFLOP/s/GPU (MFU)"
        return f"{hardware / 1e15:.0f} PF/s (HFU), {model / 1e15:.0f} (MFU)"


# Published: torchtitan benchmarks (12/2024, 06/2025); arXiv 2305.13525 abstract (its batch is not stated: 4,096 x 2k
# assumed); arXiv 2407.21783 Table 4; arXiv 2502.08145 Table III (grid not published).
KNOWN = (
    Case(LLAMA_8B, preset("dgx-h100"), 8, 16, 8192, "FSDP 8, selective recomputation", "6,667", "tokens"),
    Case(LLAMA_8B, preset("dgx-h100"), 128, 256, 8192, "FSDP 128, selective recomputation", "6,514", "tokens"),
    Case(LLAMA_70B, preset("dgx-h100"), 256, 512, 8192, "FSDP 32 × TP 8, recomputed", "597; asynchronous TP 652", "tokens"),
    Case(GPT_80B, preset("perlmutter-40g"), 1024, 4096, 2048, "4D, grid not published", "182 PF/s (57 % of peak; MFU or HFU is not said)", "hardware"),
    Case(LLAMA_405B, preset("dgx-h100"), 16384, 2048, 8192, "TP 8 × PP 16 × DP 128", "400 TFLOP/s/GPU (MFU)", "model"),
    Case(GPT_320B, preset("frontier"), 32768, 8192, 2048, "4D, grid not published", "1,381 PF/s (HFU)", "hardware"),
)  # fmt: skip
# The cases of strong scaling: a batch that caps z and data.
STRONG = (
    *(Case(LLAMA_405B, preset("dgx-h100"), 16384, sequences, 8192) for sequences in (2048, 512, 256, 128)),
    Case(GPT_320B, preset("frontier"), 32768, 1024, 2048),
    *(Case(LLAMA_70B, nvlink_domains(64), ranks, ranks // 64, 8192) for ranks in (1024, 2048, 4096)),
)


@dataclass(frozen=True)
class Adapters:
    """A published step of LoRA, and the layout of its recipe."""

    workload: Workload
    layout: Layout
    published_s: float
    sequences: int = 32
    length: int = 4096

    def line(self) -> list[str]:
        """Cells of the table; what is predicted is for compiled blocks."""
        ranks = self.layout.ranks
        case = Case(self.workload.adapted(LORA_RANK), preset("dgx-h100"), ranks, self.sequences, self.length)
        same = estimate_with(case.prices("compiled"), self.layout, self.sequences)
        best = case.plan(BOTH, "compiled").best
        tokens = self.sequences * self.length / ranks
        steps = (self.published_s, same.step_s, best.step_s)
        published, predicted, planned = (f"{s:.2f} s, {tokens / s:,.0f} tokens/s/GPU" for s in steps)
        apart = f"{same.step_s / self.published_s - 1:+.0%}"
        layout = f"FSDP {self.layout.z} × TP {self.layout.x}" if ranks > 1 else "1 GPU"
        layout += (
            ", all recomputed" if self.layout.activation_checkpointing == "full" else ", none recomputed"
        )
        words = [layout, published, f"{predicted} ({apart})", f"{best.layout}: {planned}"]
        return [f"{self.workload.name}, {ranks} × H100", *words]


def _recipe(z: int, x: int, activations: Activations) -> Layout:
    return Layout(1, z, 1, x, 32 // (2 * z), "full", activations=activations)


# Published: steps of NVIDIA's NeMo AutoModel on DGX H100, its performance summary of 2026-06-12. Micro-batches of two sequences, rank,
# recomputation and activations are those of its recipes, examples/llm_benchmark/*/*_peft_benchmark*.yaml.
LORA_RANK = 16
ADAPTERS = (
    Adapters(LLAMA_8B, Layout(1, 1, 1, 1, 16), 10.51),
    Adapters(QWEN_7B, Layout(1, 1, 1, 1, 16), 9.29),
    Adapters(LLAMA_70B, _recipe(4, 2, "sequence-parallel"), 15.00),
    Adapters(LLAMA_70B, _recipe(8, 2, "sequence-parallel"), 8.32),
    Adapters(QWEN_32B, _recipe(4, 2, "replicated"), 7.28),
    Adapters(QWEN_32B, _recipe(8, 2, "replicated"), 3.95),
)


def speed(case: Case) -> tuple[float, int]:
    """(layouts priced a second, layouts priced); grids that a division rules out are not counted."""
    start_s = time.process_time()  # of this core, whatever else the machine does
    plan = case.plan()
    seconds = time.process_time() - start_s
    indivisible = sum(r.over_bytes == 0 for r in plan.rejected)
    return (plan.considered - indivisible) / seconds, plan.considered - indivisible


def known_line(case: Case) -> list[str]:
    cells = [case.title, case.published_layout, case.published_figure]
    ways: list[tuple[tuple[Activations, ...], Elementwise]] = [
        (REPLICATED, "eager"),
        (BOTH, "eager"),
        (BOTH, "compiled"),
    ]
    for activations, elementwise in ways:
        plan = case.plan(activations, elementwise)
        if not plan.ranked:
            cells.append(f"none fits: {plan.nearest_miss().reason}")
            continue
        best, limit = plan.best, plan.memory_limit_bytes / 2**30
        held = f"{best.memory.total_bytes / 2**30:.0f} of {limit:.0f} GiB"
        cells.append(f"{best.layout}: {case.figure(best)}, {best.mfu:.1%} MFU; {held}; {best.limited_by}")
    return cells


def config_of(workload: Workload, length: int) -> PreTrainedConfig:
    """A Hugging Face model of these sizes."""
    w = workload
    if not w.gated:
        return GPT2Config(
            n_embd=w.hidden,
            n_inner=w.ffn,
            n_layer=w.layers,
            n_head=w.heads,
            n_positions=length,
            vocab_size=w.vocabulary,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    return LlamaConfig(
        hidden_size=w.hidden,
        intermediate_size=w.ffn,
        num_hidden_layers=w.layers,
        num_attention_heads=w.heads,
        num_key_value_heads=w.kv_heads,
        head_dim=w.head_dim,
        vocab_size=w.vocabulary,
        max_position_embeddings=length,
        tie_word_embeddings=w.tied,
    )


def dry_line(case: Case) -> tuple[list[str], bool]:
    """(cells, whether a step of the chosen layout runs and fits into a device)."""
    best = case.plan(BOTH, "compiled").best
    job = Job(config_of(case.workload, case.length), case.sequences, case.length, case.cluster.target)
    start_s = time.perf_counter()
    peak = estimate_in_process(job, best.layout).trace.peak.bytes / 2**30
    held, whole = best.memory.total_bytes / 2**30, case.cluster.device.memory_gib
    words = f"{peak:.1f} GiB at its peak, {held:.1f} by the formula, {whole:g} in a device"
    return [case.title, str(best.layout), words, f"{time.perf_counter() - start_s:.0f} s"], peak < whole


def strong_line(case: Case) -> tuple[list[str], float | None]:
    """(cells, gain of y where sequence-parallel activations are offered)."""
    cells, gain = [case.title], None
    for activations in (REPLICATED, BOTH):
        plan = case.plan(activations)
        if not plan.ranked:
            cells += [f"none fits: {plan.nearest_miss().reason}", "", ""]
            continue
        best = plan.best
        # The fastest layout that FSDP, tensor and data parallelism can express.
        without = next((e for e in plan.ranked if e.layout.y == 1), None)
        cells.append(f"{best.layout}: {best.step_s:.3f} s")
        if without is None:
            cells += ["none can run", "y is needed"]
            continue
        gain = without.step_s / best.step_s
        cells += [f"{without.layout}: {without.step_s:.3f} s", f"{gain:.3f}"]
    return cells, gain


def show(header: list[str], lines: list[list[str]], *, markdown: bool) -> None:
    if markdown:
        for line in (header, ["---"] * len(header), *lines):
            print("| " + " | ".join(line) + " |")
        return
    for line in lines:
        print(line[0])
        for name, value in zip(header[1:], line[1:], strict=True):
            if value:
                print(f"    {name}: {value}")


def show_adapters(markdown: bool) -> None:
    print(f"Steps of LoRA, rank {LORA_RANK}, 32 sequences of 4,096 tokens:")
    header = [
        "case",
        "published: layout",
        "published: step",
        "predicted: the same layout",
        "predicted: plan's best",
    ]
    show(header, [adapters.line() for adapters in ADAPTERS], markdown=markdown)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--markdown", action="store_true", help="tables for docs/verification/planner-accuracy.md"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only: dry-run a step of the layout that is chosen for each case",
    )
    parser.add_argument("--lora", action="store_true", help="only: steps of LoRA, published and predicted")
    options = parser.parse_args(arguments)
    if options.lora:
        show_adapters(options.markdown)
        return 0
    if options.dry_run:
        done = [dry_line(case) for case in KNOWN]
        show(
            ["case", "layout, compiled", "memory", "took"],
            [line for line, _ in done],
            markdown=options.markdown,
        )
        print(
            f"search: {sum(fits for _, fits in done)}/{len(done)} chosen layouts run and fit, by their dry runs"
        )
        return 0 if all(fits for _, fits in done) else 1

    print("Six known cases (the plan's figures are predictions):")
    header = [
        "case",
        "published layout",
        "published",
        "plan's best, activations replicated",
        "plan's best, both kinds of activations",
        "the same, compiled",
    ]
    show(header, [known_line(case) for case in KNOWN], markdown=options.markdown)
    print("Where y pays, by the whole step:")
    strong = [strong_line(case) for case in STRONG]
    header = ["case"]
    for kind in ("replicated", "sequence-parallel offered"):
        header += [f"{kind}: best", "best with y = 1", "gain of y"]
    show(header, [line for line, _ in strong], markdown=options.markdown)
    show_adapters(options.markdown)
    gains = [gain for _, gain in strong if gain is not None]
    print(
        f"with sequence-parallel activations offered, y > 1 is the best in {sum(g > 1 for g in gains)} of {len(gains)} cases, by up "
        f"to {max(gains) - 1:.1%}"
    )

    per_s, layouts = max(speed(KNOWN[-1]) for _ in range(3))
    met = per_s >= LAYOUTS_PER_S_BAR
    print(
        f"search: {per_s:,.0f} layouts/s on one core over {layouts:,} layouts of {KNOWN[-1].title}, "
        f"bar {LAYOUTS_PER_S_BAR:,}: {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
