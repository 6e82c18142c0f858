"""What a run config leaves to the memory of the devices is chosen so that it fits, with as little recomputation as possible."""

from dataclasses import replace
from typing import Any

import pytest

from fourfold.config.describe import sized_model_config
from fourfold.config.schema import EngineSection
from fourfold.parallel.checkpointing import KINDS
from fourfold.planner.cost.memory import memory
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import from_config
from fourfold.planner.search import RESERVE
from fourfold.train.memory_fit import fields_that_fit

MODEL = sized_model_config("8b", 128256)
SHAPE = (1, 8, 1, 1)
BATCH = (1, 8192, 4)  # sequences of a micro-batch, their length, micro-batches


def chosen(gib: float | None, **engine: Any) -> dict[str, Any]:
    device_bytes = None if gib is None else gib * 2**30
    return fields_that_fit(MODEL, SHAPE, EngineSection(**engine), BATCH, "adamw", device_bytes, "cuda")


def layout(fields: dict[str, Any]) -> Layout:
    return Layout(*SHAPE, micro_batches=BATCH[2], **fields)


def peak_gib(fields: dict[str, Any]) -> float:
    workload = from_config(MODEL)
    return memory(workload, layout(fields), BATCH[0] * BATCH[1], length=BATCH[1]).total_bytes / 2**30


def cost(fields: dict[str, Any]) -> list[int]:
    counts = dict(layout(fields).checkpointing_of(32))
    return [counts.get(kind, 0) for kind in reversed(KINDS)]


@pytest.mark.parametrize("gib", [32, 40, 48, 64, 80, 141, 192])
def test_it_fits_and_one_block_less_would_not(gib: float) -> None:
    fields = chosen(gib)
    limit = gib * (1 - RESERVE)
    assert peak_gib(fields) <= limit
    if fields["checkpointed_blocks"] is not None:
        fewer = replace(layout(fields), checkpointed_blocks=fields["checkpointed_blocks"] - 1)
        assert (
            memory(from_config(MODEL), fewer, BATCH[0] * BATCH[1], length=BATCH[1]).total_bytes / 2**30
            > limit
        )
    # Whole gradients are preferred, unless shards recompute less.
    ways = [chosen(gib, accumulation=way) for way in ("whole", "sharded")]
    fitting = [way for way in ways if peak_gib(way) <= limit]
    assert fields == min(fitting, key=cost)


def test_the_least_memory_is_chosen_if_nothing_fits() -> None:
    fields = chosen(24)
    assert 24 * (1 - RESERVE) < peak_gib(fields) < peak_gib({**fields, "accumulation": "whole"})
    assert fields == {
        "activation_checkpointing": "full",
        "checkpointed_blocks": None,
        "accumulation": "sharded",
    }


def test_more_memory_is_less_recomputation() -> None:
    costs = [cost(chosen(gib)) for gib in (32, 48, 80, 192)]
    assert costs == sorted(costs, reverse=True)
    assert chosen(192) == {
        "activation_checkpointing": "none",
        "checkpointed_blocks": None,
        "accumulation": "whole",
    }


def test_a_family_without_formulas_is_not_recomputed_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    settled = {"activation_checkpointing": "none", "checkpointed_blocks": None, "accumulation": "whole"}
    for config in ({"model_type": "apertus"}, {"model_type": "jamba", "num_experts": 4}):
        found = fields_that_fit(config, SHAPE, EngineSection(), BATCH, "adamw", 80 * 2**30, "cuda")
        assert found == settled
    apertus, experts = caplog.messages
    assert "model_type 'apertus' is not one of the" in apertus
    assert "set engine.activation_checkpointing and engine.accumulation" in experts


def test_what_is_set_stays_and_nothing_is_recomputed_where_nothing_is_known() -> None:
    fields = {"activation_checkpointing": "full", "checkpointed_blocks": 7, "accumulation": "sharded"}
    assert chosen(80, **fields) == chosen(None, **fields) == fields
    assert chosen(80, activation_checkpointing="selective")["activation_checkpointing"] == "selective"
    assert chosen(None) == {
        "activation_checkpointing": "none",
        "checkpointed_blocks": None,
        "accumulation": "whole",
    }
