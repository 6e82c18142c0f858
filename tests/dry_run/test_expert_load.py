"""A dry run of owned experts at a load: what the fullest rank sends, keeps and computes, against a real step whose router draws that load."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fourfold as ff
from benchmarks.dryrun import highest_bytes, live_bytes
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.dry_run.events import Operation
from fourfold.dry_run.run import dryrun

EXPERTS, CHOSEN, HIDDEN, FEATURES, LAYERS = 8, 2, 128, 192, 3
SEQUENCES, LENGTH, RANKS = 4, 256, 2
TOKENS = SEQUENCES // RANKS * LENGTH
CONFIG = Qwen3MoeConfig(
    hidden_size=HIDDEN,
    intermediate_size=256,
    moe_intermediate_size=FEATURES,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=LAYERS,
    num_experts=EXPERTS,
    num_experts_per_tok=CHOSEN,
    vocab_size=512,
)
# Of the rank with most rows: by the mean, and by all that it can have.
LOADS: dict[Any, float] = {1.0: 1.0, 1.5: 1.5, "worst": 2.0}


def draw(model: nn.Module, load: float) -> None:
    """Let routers choose two experts of the first rank for a part of the tokens, and one of each rank for the others."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, choices = output
        rows = torch.arange(len(choices))
        first = rows % (EXPERTS // RANKS)
        is_both = rows < round((load - 1) * len(choices))
        second = torch.where(is_both, (first + 1) % (EXPERTS // RANKS), first + EXPERTS // RANKS)
        return logits, weights, torch.stack([first, second], 1)

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(hook)


def real_step(weights: Any, load: float) -> tuple[Counter[tuple[str, str, str]], int]:
    """(payloads by axis, kind and purpose, the most memory of tensors)"""
    grid = Grid.create((1, RANKS, 1, 1), timeout_s=60)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIG)
    draw(model, load)
    ff.parallelize(
        model, grid, weights=weights, experts=("z",), overlap=ff.Overlap(interleave=False), precision="bf16"
    )
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-4, foreach=False)
    ids = torch.zeros(SEQUENCES // RANKS, LENGTH, dtype=torch.int64)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        ff.clip_grad_norm_(model.parameters(), 1.0, grid)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    before, peaks = live_bytes(model, optimizer, ids), []
    for _ in range(3):
        with (
            grid.collectives.recording() as flights,
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            step()
        peaks.append(before + highest_bytes(profiler))
    sent: Counter[tuple[str, str, str]] = Counter()
    for flight in flights:
        sent[flight.axis, flight.kind, flight.purpose] += flight.payload_bytes
    return sent, min(peaks)


def foreseen(weights: Any, load: Any) -> Any:
    return dryrun(
        CONFIG,
        (1, RANKS, 1, 1),
        sequences=SEQUENCES,
        length=LENGTH,
        weights=weights,
        experts=("z",),
        expert_load=load,
        overlap=ff.Overlap(interleave=False),
        target="cpu",
        trace_all=True,
    )


def sent_in(run: Any) -> Counter[tuple[str, str, str]]:
    sent: Counter[tuple[str, str, str]] = Counter()
    for start in run.collectives:
        sent[start.axis, start.kind, start.purpose] += int(start.payload_bytes)
    return sent


@pytest.mark.parametrize("weights", ["streamed", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_bytes_are_those_of_a_real_step_at_that_load(pool: RankPool, weights: str) -> None:
    for asked, load in LOADS.items():
        sent, peak_bytes = pool.run(real_step, RANKS, weights, load)[0]
        run = foreseen(weights, asked)
        assert sent_in(run) == sent, asked
        rows = TOKENS * CHOSEN
        # Forth with forward, and the gradients of what came back with backward.
        assert sent["z", "all_to_all", "dispatch"] == LAYERS * rows * (1 + load) * HIDDEN * 2
        assert run.peak.bytes / peak_bytes == pytest.approx(1, abs=0.1), asked


def test_work_is_that_of_the_rows_which_arrive() -> None:
    for asked, load in LOADS.items():
        flops = sum(
            e.flops
            for e in foreseen("streamed", asked).trace.events
            if isinstance(e, Operation) and e.work == "matmul" and ".experts" in e.module
        )
        assert flops == LAYERS * 3 * 2 * 3 * load * TOKENS * CHOSEN * HIDDEN * FEATURES


def test_a_load_below_the_mean_is_an_error() -> None:
    with pytest.raises(ValueError, match="load of experts is"):
        foreseen("streamed", 0.5)
