"""The price of float8, against arithmetic; and the devices and sizes that have none."""

import dataclasses
from typing import Any

import pytest

import fourfold as ff
from fourfold.planner.cost.block import block_passes, groups_of
from fourfold.planner.cost.compute import Kernels, matmul_s
from fourfold.planner.cost.float8 import why_not_float8
from fourfold.planner.cost.linears import Given
from fourfold.planner.cost.step import Prices, estimate_with
from fourfold.planner.inputs.cluster import Slowdown, preset
from fourfold.planner.inputs.layout import FOURFOLD, Layout, Schedule
from fourfold.planner.inputs.workload import Workload

H100 = preset("dgx-h100")
LLAMA = Workload("8b", 4096, 14336, 32, 32, 8, 128, 128256)
TOKENS = 8192
# Inputs of the four groups of linears, and the widths of their outputs.
GROUPS = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
CONFIG = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip


def passes(schedule: Schedule, y: int = 1, x: int = 1) -> Any:
    def send(kind: str, axis: str, payload_bytes: float) -> float:
        return payload_bytes if (x if axis == "x" else y) > 1 else 0.0

    given = Given(TOKENS, y, x, H100.device, Kernels(), schedule, Slowdown(1.0, 1.0), send)
    return block_passes(LLAMA, TOKENS, given)


FUSED = dataclasses.replace(FOURFOLD, elementwise="fused")
FLOAT8 = dataclasses.replace(FUSED, float8=True)


def test_two_of_three_matmuls_are_at_the_rate_of_e4m3() -> None:
    (forward, backward, again), (forward8, backward8, again8) = passes(FUSED), passes(FLOAT8)
    faster = 1979 / 989
    assert forward8.matmul_s == pytest.approx(forward.matmul_s / faster)
    assert again8.matmul_s == pytest.approx(again.matmul_s / faster)
    weights_s = sum(
        matmul_s(1, n, k, TOKENS, H100.device, Kernels().matmul_share) for k, widths in GROUPS for n in widths
    )
    assert backward8.matmul_s == pytest.approx((backward.matmul_s - weights_s) / faster + weights_s)
    assert forward8.attention_s == forward.attention_s


def test_casts_read_operands_twice_and_write_them_once() -> None:
    (forward, backward, _), (forward8, backward8, _) = passes(FUSED), passes(FLOAT8)
    a_second = 3.35e12 * 0.85
    weights = sum(k * sum(widths) for k, widths in GROUPS)
    inputs, outputs = (TOKENS * sum(n) for n in ([k for k, _ in GROUPS], [sum(w) for _, w in GROUPS]))
    assert forward8.elementwise_s - forward.elementwise_s == pytest.approx(
        (2 * 2 + 1) * (inputs + weights) / a_second
    )
    assert backward8.elementwise_s - backward.elementwise_s == pytest.approx((2 * 2 + 1) * (outputs + weights) / a_second)  # fmt: skip


def test_largest_magnitudes_are_sent() -> None:
    (forward, backward, _), (forward8, backward8, _) = passes(FUSED, 2, 2), passes(FLOAT8, 2, 2)
    # y shards the inputs of q, k, v and of gate, up; x those of o and down. Two bytes for each number; nothing hides them.
    rows = {"y": (4096 + 1024 + 1024) / 2 + 14336 * 2 / 2, "x": (4096 + 4096) / 2}
    # Gradients of five outputs come from x, and of two from y; the same number of whole weights on the other axis.
    members = {"y": (5, 2), "x": (2, 5)}
    for axis, (of_weights, of_gradients) in members.items():
        sent_bytes = 2 * (2 * TOKENS + rows[axis])
        assert forward8.link_s[axis] - forward.link_s[axis] == pytest.approx(sent_bytes)
        assert forward8.exposed_s[axis] - forward.exposed_s[axis] >= 0.99 * sent_bytes
        sent_bytes = 2 * (of_weights + of_gradients * (TOKENS + 1))
        assert backward8.link_s[axis] - backward.link_s[axis] == pytest.approx(sent_bytes)


def test_the_head_stays_in_bf16() -> None:
    layout = Layout(1, 8, 1, 1)
    of_blocks = [
        8192 * sum(b.matmul_s for b in Prices(LLAMA, H100, TOKENS, s).passes(TOKENS, 1, 1)[3:]) for s in (FUSED, FLOAT8)
    ]  # fmt: skip
    assert of_blocks[0] == of_blocks[1] > 0
    slow, fast = (estimate_with(Prices(LLAMA, H100, TOKENS, s), layout, 16).step_s for s in (FUSED, FLOAT8))
    assert 1.1 < slow / fast < 1.6


@pytest.mark.parametrize(
    ("cluster", "device"),
    [("dgx-a100", "A100-SXM-80GB"), ("frontier", "MI250X-GCD"), ("aurora", "PVC-tile")],
)
@pytest.mark.parametrize("simulate", [0, 1])
def test_a_device_without_a_published_rate_is_refused(cluster: str, device: str, simulate: int) -> None:
    with pytest.raises(ValueError, match=rf"{device}.* has float8_tflops=None .*use float8='none'"):
        ff.plan(
            CONFIG, cluster, 8, sequences=8, length=TOKENS, float8="rowwise_with_gw_hp", simulate=simulate
        )


def test_a_model_whose_linears_do_not_all_divide_is_refused() -> None:
    config = CONFIG | {"intermediate_size": 14328}
    with pytest.raises(ValueError, match=r"intermediate_size=14328 .* not a multiple of 16.*float8='none'"):
        ff.plan(config, H100, 8, sequences=8, length=TOKENS, float8="rowwise_with_gw_hp")


def test_grids_that_a_run_would_refuse_are_rejected() -> None:
    small = Workload("small", 512, 1024, 2, 16, 16, 32, 1000)
    assert why_not_float8(groups_of(small, 1, 16, by_tokens=False), 1, 16) is None
    reason = why_not_float8(groups_of(small, 64, 1, by_tokens=False), 64, 1)
    assert reason is not None
    assert "8 features" in reason
    found = ff.plan(CONFIG | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16,
                              "num_key_value_heads": 16, "num_hidden_layers": 2, "head_dim": 32},
                    H100, 64, sequences=64, length=1024, float8="rowwise_with_gw_hp")  # fmt: skip
    rejected = {r.layout.grid: r.reason for r in found.rejected if "in float8" in r.reason}
    assert "8 features" in rejected[1, 1, 64, 1]
    assert not any(e.layout.y == 64 for e in found.ranked)


def test_presets_have_the_rate_where_the_vendor_publishes_one() -> None:
    for name, rate in (
        ("dgx-h100", 1979),
        ("alps-gh200", 1979),
        ("aws-p5en", 1979),
        ("dgx-b200", 4500),
        ("dgx-a100", None),
    ):
        assert preset(name).device.float8_tflops == rate
    assert H100.device.best_float8_tflops == pytest.approx(794.5 * 1979 / 989)
