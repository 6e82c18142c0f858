"""Experts send what the formulas say, to the byte; the rest of the model is a Llama without its MLP (`benchmarks/traffic.py`)."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks import traffic
from benchmarks.ranks import RankPool
from benchmarks.traffic import BATCH, BYTES, FFN, HEAD_DIM, HEADS, KV_HEADS, LAYERS, SEQUENCE, VOCABULARY, H

EXPERTS, CHOSEN, INDEX_BYTES = 4, 2, 8
Shape = tuple[int, int, int, int]


def mixtral(kind: str) -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=H,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    return MixtralForCausalLM(config)


def count(shape: Shape, activations: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "build", mixtral)
        return traffic.count_rank("mixtral", shape, "fsdp2", activations)


def of_experts(shape: Shape, activations: str) -> dict[tuple[str, str], Fraction]:
    """Bytes that a rank sends for the experts and routers of all layers, in forward and backward."""
    data, z, y, x = shape
    tokens = BATCH * SEQUENCE // (data * z)
    gathers = Fraction(4 * tokens * H * BYTES)  # an all-reduce is as much as two of them
    over = {axis: Fraction(size - 1, size) for axis, size in zip(("data", "z", "y", "x"), shape, strict=True)}
    if activations == "sequence-parallel":
        sent = {
            ("y", "activation"): gathers / x * over["y"],
            ("x", "activation"): gathers * over["x"],
            # Gathered over x: weights forth, their gradients back, and choices; the gradients are summed over y.
            ("x", "routing"): tokens * CHOSEN * (2 * BYTES + INDEX_BYTES) * over["x"],
            ("y", "routing"): 2 * tokens * CHOSEN * BYTES / Fraction(x) * over["y"],
        }
    else:
        sent = {
            ("y", "activation"): gathers * over["y"],
            ("x", "activation"): gathers / y * over["x"],
            **{(axis, "routing"): 2 * tokens * CHOSEN * BYTES * over[axis] for axis in ("y", "x")},
        }
    weights = EXPERTS * (Fraction(3 * FFN * H, x * y) + H) * BYTES
    sent["z", "weight"] = 2 * weights * over["z"]
    sent["z", "gradient"] = weights * over["z"]
    sent["data", "gradient"] = 2 * weights / z * over["data"]
    return {key: LAYERS * size for key, size in sent.items()}


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 2, 2), *(pytest.param(s, marks=pytest.mark.nightly) for s in ((2, 1, 2, 2), (1, 1, 2, 4)))],
)
def test_experts_send_what_the_formulas_say(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, shape: Shape, activations: str
) -> None:
    attention = traffic._blocks("llama")[:2]
    monkeypatch.setattr(traffic, "_blocks", lambda kind: attention)
    formula = traffic.expected("llama", shape, "fsdp2")
    for key, size in of_experts(shape, activations).items():
        formula[key] = formula.get(key, Fraction(0)) + size
    formula = {key: size for key, size in formula.items() if size}
    for forward, backward in pool.run(count, 8, shape, activations):
        measured: dict[tuple[str, str], Fraction] = {}
        for entry in (*forward, *backward):
            if entry.purpose not in traffic.APART:
                factor = Fraction((2 if entry.kind == "all_reduce" else 1) * (entry.ranks - 1), entry.ranks)
                key = (entry.axis, entry.purpose)
                measured[key] = measured.get(key, Fraction(0)) + factor * entry.payload_bytes
        assert measured == formula
