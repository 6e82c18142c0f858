"""The plans of adapters that the docs show are those that the planner makes."""

from pathlib import Path
from typing import Any

import pytest

from fourfold.planner.plan import plan

PAGE = Path(__file__).parents[2] / "docs/verification/planner-accuracy.md"
GIB = 2**30
SIZES = {"70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}


def llama(size: str) -> dict[str, Any]:
    hidden, ffn, layers, heads = SIZES[size]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }


@pytest.mark.parametrize(
    ("size", "ranks", "sequences", "quantization"),
    [("70B", 8, 32, "none"), ("70B", 8, 32, "nf4"), ("405B", 16, 16, "none"), ("405B", 8, 16, "nf4")],
)
def test_a_row_of_the_page_is_the_planners(size: str, ranks: int, sequences: int, quantization: Any) -> None:
    found = plan(
        llama(size),
        "dgx-h100",
        ranks,
        sequences=sequences,
        length=4096,
        lora_rank=16,
        quantization=quantization,
        quiet=True,
    ).best
    memory = found.memory
    kept = memory.gradients_bytes + memory.optimizer_bytes, memory.activations_bytes
    held = memory.parameters_bytes, *kept, memory.gathered_bytes + memory.buffers_bytes, memory.logits_bytes
    kinds = [f"{blocks} {kind}" for kind, blocks in found.layout.checkpointing_of(SIZES[size][2])]
    row = [
        f"{size}{', NF4' if quantization == 'nf4' else ''}, {ranks} × H100, {sequences} × 4,096",
        f"{found.layout.grid}, {found.layout.micro_batches} micro-batches; blocks: {', '.join(kinds)}",
        f"{found.tokens_per_s:,.0f}; {found.step_s:.2f} s",
        *(f"{size / GIB:.2f}" for size in held),
    ]
    assert f"| {' | '.join(row)} |" in PAGE.read_text(encoding="utf-8").splitlines()


def test_frozen_weights_of_405b_do_not_fit_into_8_devices_in_bf16() -> None:
    found = plan(llama("405B"), "dgx-h100", 8, sequences=16, length=4096, lora_rank=16, quiet=True)
    assert not found.ranked
