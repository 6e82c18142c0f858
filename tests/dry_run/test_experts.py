"""A dry run of experts: shapes do not depend on what routers choose, and each rank computes its part of every expert."""

import copy
from collections import Counter
from typing import Any

import pytest
from transformers import MixtralConfig

from fourfold.dry_run.events import Operation, Start
from fourfold.dry_run.run import dryrun

TOKENS, HIDDEN, FEATURES, CHOSEN, LAYERS = 64, 64, 32, 2, 2
CONFIG = MixtralConfig(
    hidden_size=HIDDEN,
    intermediate_size=FEATURES,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=LAYERS,
    num_local_experts=4,
    num_experts_per_tok=CHOSEN,
    vocab_size=96,
)


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_matmuls_of_experts(precision: Any, activations: Any) -> None:
    run = dryrun(
        CONFIG,
        (1, 1, 2, 2),
        sequences=2,
        length=32,
        precision=precision,
        activations=activations,
        trace_all=True,
    )
    of_experts = [
        event
        for event in run.trace.events
        if isinstance(event, Operation) and event.work == "matmul" and ".experts" in event.module
    ]
    # Forward and two in backward, of gate, up and down.
    flops = 3 * 2 * 3 * TOKENS * CHOSEN * HIDDEN * FEATURES / 4
    assert sum(event.flops for event in of_experts) == LAYERS * flops


@pytest.mark.parametrize(("activations", "axes"), [("replicated", ("z",)), ("sequence-parallel", ("z", "x"))])
def test_the_auxiliary_loss_sends_counts_and_probabilities(activations: Any, axes: tuple[str, ...]) -> None:
    """Once in a forward: 2E+1 numbers in fp32 over each axis whose ranks have different tokens."""
    config = copy.deepcopy(CONFIG)
    config.output_router_logits = True
    run = dryrun(config, (1, 2, 1, 2), sequences=4, length=32, activations=activations, trace_all=True)
    sent = Counter(
        (event.axis, event.kind, event.payload_bytes)
        for event in run.trace.events
        if isinstance(event, Start) and event.purpose == "balance"
    )
    assert sent == Counter({(axis, "all_reduce", 4 * (2 * 4 + 1)): 1 for axis in axes})
