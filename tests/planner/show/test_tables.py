from dataclasses import replace

from fourfold import plan
from fourfold.planner.show.tables import speedups
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
