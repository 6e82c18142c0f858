"""Changing a value of a cluster changes predictions, also where measurements take precedence over formulas."""

from dataclasses import replace

import pytest

from fourfold.dry_run.events import Operation
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.cost.compute import operation_s
from fourfold.planner.inputs.cluster import Cluster, preset
from fourfold.planner.inputs.measured import CollectiveTimes, MatmulTime, Measured
from fourfold.planner.perturb import SECTIONS, changed, value_of

PRESET = preset("dgx-h100")
SIZES, SECONDS = (1e3, 1e9), (1e-4, 1e-1)
MEASURED = replace(
    PRESET,
    measured=Measured(
        collectives=tuple(
            CollectiveTimes(kind, ranks, inner, SIZES, SECONDS)
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
            for ranks, inner in ((8, 1), (2, 8))
        ),
        matmuls=(MatmulTime(1024, 1024, 1024, 1e-5),),
        attention_forward_tflops=100.0,
        attention_backward_tflops=100.0,
    ),
)


def times(cluster: Cluster) -> dict[str, float]:
    def operator(work: str, flops: float, moved: float) -> float:
        shape = (1, 1024, 1024, 1024) if work == "matmul" else (1,)
        return operation_s(Operation("forward", "m", "aten.x", work, flops, moved, shape), cluster)

    return {
        "inside": collective_s("all_gather", 1e9, 8, 1, cluster),
        "between": collective_s("all_gather", 1e9, 2, 8, cluster),
        "small inside": collective_s("all_gather", 1e3, 8, 1, cluster),
        "small between": collective_s("all_gather", 1e3, 2, 8, cluster),
        "matmul": operator("matmul", 2.0 * 1024**3, 0.0),
        "attention": operator("attention", 1e12, 0.0),
        "memory": operator("memory", 0.0, 1e9),
        "operator": operator("memory", 0.0, 1.0),
    }


CHANGES = {
    "node_gbps": {"between"},
    "device_gbps": {"inside"},
    "net_hop_us": {"between", "small between"},
    "base_us": {"inside", "between", "small inside", "small between"},
    "best_tflops": {"matmul", "attention"},
    "memory_tbps": {"memory"},
    "launch_us": {"matmul", "operator"},  # this matmul is shorter than two launches
}


@pytest.mark.parametrize("name", list(SECTIONS))
def test_each_value_changes_what_depends_on_it_on_a_calibrated_cluster(name):
    before, after = times(MEASURED), times(changed(MEASURED, name, 2.0))
    moved = {what for what in before if after[what] != pytest.approx(before[what], rel=1e-4)}
    assert moved == CHANGES[name]
    assert value_of(changed(MEASURED, name, 2.0), name) == 2 * value_of(MEASURED, name)


def test_twice_the_rate_halves_what_bytes_take():
    assert times(changed(MEASURED, "node_gbps", 2.0))["between"] == pytest.approx(1e-4 + (1e-1 - 1e-4) / 2)
