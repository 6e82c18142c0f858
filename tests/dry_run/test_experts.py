"""A dry run of experts: shapes do not depend on what routers choose, and each rank computes its part of every expert."""

from typing import Any

import pytest
from transformers import MixtralConfig

from fourfold.dry_run.events import Operation
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
