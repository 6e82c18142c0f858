"""Computation: no faster than the device, and the laws of tiles and waves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.planner.cost.compute import Kernels, attention_core_s, matmul_s, memory_s
from fourfold.planner.inputs.cluster import preset

DEVICE = preset("dgx-a100").device
sizes = st.integers(1, 20000)


@given(st.integers(1, 8), sizes, sizes, sizes)
def test_no_matmul_beats_the_best_that_was_measured(batch, m, n, k):
    assert 2 * batch * m * n * k / matmul_s(batch, m, n, k, DEVICE) <= DEVICE.best_tflops * 1e12 * (1 + 1e-9)


@given(sizes, sizes, sizes)
def test_no_matmul_is_shorter_than_a_launch_or_than_its_bytes(m, n, k):
    seconds = matmul_s(1, m, n, k, DEVICE)
    assert seconds >= DEVICE.launch_us * 1e-6
    assert seconds >= 2 * (m * k + k * n + m * n) / (DEVICE.memory_tbps * 1e12)


def test_a_tile_more_than_a_wave_costs_a_wave():
    # 108 multiprocessors, tiles of 256 x 128: 12 x 9 of them fill one wave; one row of tiles more does not fit.
    full = matmul_s(1, 12 * 256, 9 * 128, 8192, DEVICE)
    over = matmul_s(1, 13 * 256, 9 * 128, 8192, DEVICE)
    assert over / full > 1.3  # 13/12 of the work


def test_thin_blocks_are_less_efficient():
    def rate(n: int) -> float:
        return n / matmul_s(1, 4096, n, 8192, DEVICE)

    assert rate(64) < 0.7 * rate(8192)


def test_fused_attention_is_quadratic_in_the_length_and_linear_in_the_tokens():
    def seconds(tokens: int, length: int) -> float:
        return attention_core_s(tokens, length, 4096, 32, DEVICE, Kernels(), fused=True)[0]

    assert seconds(8192, 8192) == pytest.approx(4 * seconds(8192, 2048))
    assert seconds(16384, 2048) == pytest.approx(2 * seconds(8192, 2048))


def test_attention_in_parts_is_longer_than_fused():
    fused = attention_core_s(8192, 2048, 4096, 32, DEVICE, Kernels(), fused=True)
    parts = attention_core_s(8192, 2048, 4096, 32, DEVICE, Kernels(), fused=False)
    assert sum(parts) > sum(fused)


def test_bytes_take_their_time():
    assert memory_s(DEVICE.memory_tbps * 1e12 * DEVICE.memory_share, DEVICE) == pytest.approx(1.0)
