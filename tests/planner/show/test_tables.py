from dataclasses import replace

from fourfold import plan
from fourfold.planner.inputs.cluster import load
from fourfold.planner.show.tables import show_plan, speedups
from tests.models import construct


def test_a_simulated_step_is_not_compared_with_one_by_formulas():
    found = plan(construct("llama").config, "dgx-h100", 16, sequences=32, length=64)
    assert [line.split(",")[0] for line in speedups(found)] == [
        "The best layout has y = 1; the best with y > 1",
        "The best layout has replicated activations; the best with sequence-parallel ones",
    ]
    best, *others = found.ranked
    mixed = replace(found, ranked=[replace(best, is_simulated=True), *others])
    assert speedups(mixed) == []


def test_layouts_that_float8_cannot_have_are_one_kind():
    cluster = load("dgx-h100")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = construct("llama").config.to_dict() | {"head_dim": 16} | sizes
    found = plan(config, cluster, 8, sequences=32, length=64, precision="bf16", float8="rowwise_with_gw_hp")
    shown = show_plan(found, cluster, "", 3, 150)
    assert "cannot: features of a matmul are not a multiple of 16, as float8 needs them" in shown
