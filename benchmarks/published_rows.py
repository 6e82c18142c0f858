"""The published runs that Fourfold's space can express, each as something the planner can predict.

In scope is bf16 (or fp16) work under FSDP, ZeRO-3, tensor and data parallelism without pipeline stages. Everything else is
listed with its reason. What a source does not say is assumed here, in one place, and said so.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fourfold.planner.inputs.layout import Layout, Schedule
from fourfold.planner.inputs.workload import Workload

DATA = Path(__file__).with_name("data") / "published_runs.json"
WHOLE = 1 << 62  # bytes of weights to keep: all of them (FSDP's SHARD_GRAD_OP)

Recompute = Literal["none", "half", "attention", "full"]


@dataclass(frozen=True)
class Row:
    """One published step time and the layout that gave it. ``software`` names the figures that are fitted together."""

    id: str
    source: str
    software: str
    cluster: str  # which machine, in the words of `published.CLUSTERS`
    workload: Workload
    layouts: tuple[Layout, ...]  # several where the source leaves the micro-batch open: the best is taken
    schedule: Schedule
    batch_sequences: int
    length: int
    recompute: Recompute
    measured_s: float
    counts: str  # MFU or HFU, as the source says

    @property
    def is_fitted(self) -> bool:
        """The split. ZeRO-3: the 530B rows are fitted, the 175B rows held out. All others: by the hash of the row's name,
        so that nobody chose."""
        if self.software == "zero3":
            return "529.6" in self.id
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 0


def gpt(name: str, hidden: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Workload:
    return Workload(
        name,
        hidden,
        4 * hidden,
        layers,
        heads,
        heads,
        hidden // heads,
        vocabulary,
        gated=False,
        bias=True,
        **more,
    )


# mosaicml/llm-foundry's MPT shapes; each row's parameter count is checked against them.
_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
_LLAMA = {
    "llama3.1-8b": Workload("8b", 4096, 14336, 32, 32, 8, 128, 128256),
    "llama3.1-70b": Workload("70b", 8192, 28672, 80, 64, 8, 128, 128256),
}
# FSDP as Composer runs it: bf16 gradients, reduced with every micro-batch.
_FSDP = Schedule(gradient_bytes=2, sends_every_micro_batch=True)
# Megatron of 2021 and Megatron-DeepSpeed: attention in parts, nothing hidden, fp16 gradients.
_MEGATRON = Schedule(
    gradient_bytes=2, hides_data=False, hides_backward=False, chunks_for=None, attention="plain"
)
_ZERO3 = Schedule(gradient_bytes=2, attention="plain")
_SEQUENCE_PARALLEL = Schedule(
    gradient_bytes=2,
    hides_data=False,
    hides_backward=True,
    chunks_for=None,
    attention="plain",
    cuts_tokens_over_x=True,
)
# Megatron-Core with its overlaps, distributed optimizer; torchtitan's FSDP2 and tensor parallelism.
_MCORE = Schedule(optimizer_over_data=True, cuts_tokens_over_x=True)
_TITAN = Schedule(cuts_tokens_over_x=True, chunks_for=None)
_TITAN_ASYNC = Schedule(cuts_tokens_over_x=True)


def read() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(DATA.read_text())
    return runs


def in_scope() -> list[Row]:
    return [row for run in read() if out_of_scope(run) is None for row in rows_of(run)]


def out_of_scope(run: dict[str, Any]) -> str | None:
    """Why a run is not predicted here; None if it is."""
    name = run["id"]
    if name.startswith("axonn"):
        return "AxoNN's Table III: predicted apart, by the best layout"
    if name.startswith("mbridge"):
        return "fp8 or fp4 work by another recipe than Fourfold's"
    if run.get("scheme") == "ptd" or (run.get("pp") or 1) > 1:
        return "pipeline stages"
    if str(run.get("precision", "")).find("fp8") >= 0 or run.get("float8"):
        return "fp8 or fp4 work by another recipe than Fourfold's"
    if run["metric"] == "memory_gib":
        return "memory, not time"
    if name.startswith(("frontier-dash24", "mcore-h100-strong", "korth22-530B-2240")):
        return "the source gives no layout"
    return None


def out_of_scope_counts() -> Counter[str]:
    return Counter(reason for run in read() if (reason := out_of_scope(run)) is not None)


def rows_of(run: dict[str, Any]) -> Iterator[Row]:
    name = run["id"]
    for prefix, build in _BUILDERS.items():
        if name.startswith(prefix):
            yield from build(run)
            return
    raise ValueError(f"run {name!r} is in scope and none of the {len(_BUILDERS)} readers knows it; add one")


def _foundry(run: dict[str, Any]) -> Iterator[Row]:
    size = run["id"].split("-")[1]
    hidden, layers, heads = _MPT[size]
    workload = gpt(size, hidden, layers, heads, 50368, tied=True, positions=run["seq"])
    if workload.parameters != run["params"]:
        raise ValueError(
            f"{run['id']}: the source counts {run['params']} parameters, this shape has {workload.parameters}"
        )
    gpus, length = run["gpus"], run["seq"]
    kept = WHOLE if run["sharding"] == "SHARD_GRAD_OP" else 0
    layout = Layout(1, gpus, 1, 1, run["grad_accum"], run["recompute"], kept)
    step_s = run["global_batch"] * length / (run["value"] * gpus)
    device = run["system"].split("_")[0].strip()
    yield Row(
        f"{run['id']}-{run['precision']}", "llm-foundry", f"foundry-{device}", run["system"].split(" |")[0], workload,
        (layout,), _FSDP, run["global_batch"], length, run["recompute"], step_s, "MFU and HFU",
    )  # fmt: skip


def _vtrain(run: dict[str, Any]) -> Iterator[Row]:
    m = run["model"]
    workload = gpt(run["id"], m["hidden"], m["layers"], m["heads"], 51200, tied=True, positions=m["seq"])
    micro_batches = run["global_batch"] // (run["dp"] * run["micro_batch"])
    layout = Layout(run["dp"], 1, 1, run["tp"], micro_batches, "full")
    yield Row(
        run["id"], "vTrain", "megatron", "vtrain", workload, (layout,), _MEGATRON, run["global_batch"], m["seq"],
        "full", run["value"], "seconds",
    )  # fmt: skip


def _open_micro_batch(
    data: int, x: int, batch: int, recompute: Literal["none", "full"]
) -> tuple[Layout, ...]:
    """The source does not say the micro-batch: any of 1, 2, 4 or 8 sequences."""
    sizes = [s for s in (1, 2, 4, 8) if batch % (data * s) == 0]
    return tuple(Layout(data, 1, 1, x, batch // (data * s), recompute) for s in sizes)


def _megatron21(run: dict[str, Any]) -> Iterator[Row]:
    batch, gpus = run["global_batch"], run["gpus"]
    if run.get("scheme") == "zero3":
        shape = (12288, 96, 96) if run["params_b"] < 200 else (20480, 105, 128)
        workload = gpt(run["id"], *shape, 51200, tied=True, positions=2048)
        layouts: tuple[Layout, ...] = (Layout(1, gpus, 1, 1, batch // (gpus * run["micro_batch"]), "full"),)
        software, schedule = "zero3", _ZERO3
    else:
        m = run["model"]
        workload = gpt(run["id"], m["hidden"], m["layers"], m["heads"], m["vocab"], tied=True, positions=2048)
        layouts = _open_micro_batch(run["dp"], run["tp"], batch, "full")
        software, schedule = "megatron", _MEGATRON
    flops = workload.hardware_flops(batch * 2048, 2048, again=workload.layers)
    measured_s = flops / (run["value"] * 1e12 * gpus)
    yield Row(
        run["id"], "Megatron 2021", software, "selene", workload, layouts, schedule, batch, 2048, "full", measured_s,
        "HFU",
    )  # fmt: skip


def _korthikanti(run: dict[str, Any]) -> Iterator[Row]:
    m = run["model"]
    workload = gpt(run["id"], m["hidden"], m["layers"], m["heads"], 51200, tied=True, positions=m["seq"])
    whole = run["recompute"] == "full"
    layout = Layout(1, 1, 1, 8, 1, "full" if whole else "none")
    yield Row(
        run["id"], "Korthikanti 2022", "megatron", "selene", workload, (layout,),
        _MEGATRON if whole else _SEQUENCE_PARALLEL, run["global_batch"], m["seq"], "full" if whole else "attention",
        run["value"], "seconds",
    )  # fmt: skip


def _mcore(run: dict[str, Any]) -> Iterator[Row]:
    m, batch = run["model"], run["global_batch"]
    workload = gpt(run["id"], m["hidden"], m["layers"], m["heads"], m["vocab"])
    measured_s = workload.model_flops(batch * m["seq"], m["seq"]) / (run["value"] * 1e12 * run["gpus"])
    yield Row(
        run["id"], "Megatron-Core", "compiled-h100", "h100", workload,
        _open_micro_batch(run["dp"], run["tp"], batch, "none"), _MCORE, batch, m["seq"], "none", measured_s, "MFU",
    )  # fmt: skip


def _titan(run: dict[str, Any]) -> Iterator[Row]:
    workload = _LLAMA[run["model"]]
    z, x = run["fsdp"], run.get("tp", 1)
    recompute: Recompute = "full" if run["ac"] == "full" else "half"  # 'selective' saves every other matmul
    batch, length = z * run["micro_batch"], run.get("seq") or 8192
    values = run["value"] if isinstance(run["value"], dict) else {"": run["value"]}
    for way, tokens_per_s in values.items():
        compiled = run.get("compile", True)
        yield Row(
            run["id"] + (f"-{way}" if way else ""), "torchtitan", "compiled-h100" if compiled else "eager-h100",
            "titan-h100", workload, (Layout(1, z, 1, x, 1, "full" if recompute == "full" else "none"),),
            _TITAN_ASYNC if way == "async_tp" else _TITAN, batch, length, recompute,
            batch * length / (tokens_per_s * run["gpus"]), "tokens/s",
        )  # fmt: skip


_BUILDERS = {
    "llmfoundry": _foundry,
    "vtrain": _vtrain,
    "megatron21": _megatron21,
    "korth22": _korthikanti,
    "mcore": _mcore,
    "torchtitan": _titan,
}
