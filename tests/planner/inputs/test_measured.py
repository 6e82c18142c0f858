"""Measurements in a cluster file: they round-trip, and take precedence over any formula."""

import dataclasses
import tomllib

import pytest

from fourfold.dry_run.events import Operation
from fourfold.planner.cost.collective import collective_s
from fourfold.planner.cost.compute import Kernels, matmul_s, memory_s, operation_s
from fourfold.planner.inputs.cluster import from_dict, load, preset, presets, to_toml
from fourfold.planner.inputs.measured import CollectiveTimes, MatmulTime, Measured, Together

TIMES = CollectiveTimes("all_reduce", 8, 1, (1e3, 1e6, 2e6), (1e-3, 2e-3, 4e-3), (1e-5, 1e-5, 2e-5))
MEASURED = Measured(
    collectives=(TIMES,),
    together=(Together(8, 1, 1.2, 1.5),),
    matmuls=(MatmulTime(256, 256, 256, 1e-3), MatmulTime(1024, 1024, 1024, 2e-2, 1e-4)),
    attention_forward_tflops=0.01,
)
CLUSTER = dataclasses.replace(preset("dgx-h100"), measured=MEASURED)


def test_measurements_round_trip_through_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(CLUSTER))
    assert load(path) == CLUSTER


@pytest.mark.parametrize("name", presets())
def test_presets_have_no_measurements(name):
    assert preset(name).measured == Measured()
    assert "[measured]" not in to_toml(preset(name))


def test_a_measured_collective_comes_before_the_formula():
    assert collective_s("all_reduce", 5e2, 8, 1, CLUSTER) == 1e-3  # none smaller was measured
    assert collective_s("all_reduce", 1e6, 8, 1, CLUSTER) == 2e-3
    assert collective_s("all_reduce", 1.5e6, 8, 1, CLUSTER) == pytest.approx(3e-3)
    assert collective_s("all_reduce", 4e6, 8, 1, CLUSTER) == pytest.approx(8e-3)  # on the last line


@pytest.mark.parametrize(
    ("kind", "ranks", "inner"), [("all_gather", 8, 1), ("all_reduce", 4, 1), ("all_reduce", 8, 8)]
)
def test_a_collective_that_was_not_measured_uses_the_formulas(kind, ranks, inner):
    assert collective_s(kind, 1e6, ranks, inner, CLUSTER) == collective_s(
        kind, 1e6, ranks, inner, preset("dgx-h100")
    )


def operation(work, shape=(1, 1, 1), *, flops=0.0, moved=0.0, phase="forward", name="aten.mul.Tensor"):
    return Operation(phase, "layer", name, work, flops, moved, shape)


def test_a_matmul_has_the_rate_of_the_shapes_near_it():
    def rate(m, n, k):
        return MEASURED.matmul_flops_per_s(m, n, k)

    small, large = (t.flops_per_s for t in MEASURED.matmuls)
    assert rate(256, 256, 256) == pytest.approx(small)
    assert rate(1024, 1024, 1024) == pytest.approx(large)
    assert min(small, large) < rate(512, 512, 512) < max(small, large)
    near_small = abs(rate(300, 300, 300) / small - 1)
    assert near_small < abs(rate(300, 300, 300) / large - 1)
    seconds = operation_s(operation("matmul", (3, 256, 256, 256), flops=3 * 2 * 256**3), CLUSTER)
    assert seconds == pytest.approx(3e-3)


def test_an_operator_costs_its_bytes_or_its_launch():
    device = CLUSTER.device
    assert operation_s(operation("memory", moved=1e9), CLUSTER) == memory_s(1e9, device)
    assert operation_s(operation("memory", moved=1.0), CLUSTER) == device.launch_us * 1e-6
    assert operation_s(operation("memory", moved=1e9, name="aten.new_empty.default"), CLUSTER) == 0
    assert operation_s(operation("attention", flops=1e9), CLUSTER) == pytest.approx(0.1)


def test_without_measurements_an_operator_costs_what_the_formulas_say():
    plain = preset("dgx-h100")
    shape = (1, 4096, 4096, 4096)
    assert operation_s(operation("matmul", shape, flops=2 * 4096**3), plain) == matmul_s(
        *shape, plain.device, Kernels().matmul_share
    )
    assert operation_s(operation("memory", moved=1.0), plain) == plain.device.launch_us * 1e-6


def test_mistakes_in_a_file_are_rejected():
    values = tomllib.loads(to_toml(CLUSTER))
    values["measured"]["collectives"][0]["secnds"] = [1.0]
    with pytest.raises(ValueError, match="secnds"):
        from_dict(values)
    values = tomllib.loads(to_toml(CLUSTER))
    values["measured"]["matmul"] = []
    with pytest.raises(ValueError, match="did you mean 'matmuls'"):
        from_dict(values)
    values = tomllib.loads(to_toml(CLUSTER))
    values["measured"]["collectives"][0]["seconds"] = [1.0]
    with pytest.raises(ValueError, match="3 sizes and 1 times"):
        from_dict(values)


@pytest.mark.parametrize("old", [{"crowding": 4.0}, {"phases": [{"phase": "forward", "operator_us": 20.0}]}])
def test_a_calibration_of_an_older_version_is_rejected_with_the_way_out(old):
    values = tomllib.loads(to_toml(CLUSTER))
    values["measured"] |= old
    with pytest.raises(ValueError, match=f"'{next(iter(old))}'.*run fourfold calibrate again"):
        from_dict(values)
