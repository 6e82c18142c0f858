"""Computation time on one device: matmuls by tiles and waves, the rest by the bytes moved.

A matmul's output is split into tiles, which run on the multiprocessors in waves; the last wave takes as long as a full
one. The rate on the best shapes is measured (`Device.best_tflops`), not taken from the data sheet.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.planner.inputs.cluster import Cluster, Device

if TYPE_CHECKING:
    from fourfold.dry_run.events import Operation

# Rows and columns of a tile, and its rate against the largest: a small tile reads more for each multiplication.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
_SPLITS = (1, 2, 4, 8)  # of the inner dim, where there are too few tiles
_RAMP = 256  # inner elements that a tile multiplies before it is at full rate (load, store)


@dataclass(frozen=True)
class Kernels:
    """How well software uses the device: 1 is the best that was measured, or the least bytes that will do.

    The defaults lie among those that `benchmarks.published` fits to other software.
    """

    matmul_share: float = 0.76  # of best_tflops in a training step: clocks under load, layouts, gaps
    attention_share: float = 0.36  # of best_tflops in the attention kernel, counting a causal half
    memory_passes: float = 1.0  # times the bytes of `elementwise.py`, in a block
    score_passes: float = 6.0  # bf16 passes over the matrix of scores, where attention is not fused
    host_us: float = 0.0  # what the processor that launches needs for a block's forward


def matmul_s(
    batch: int, m: float, n: float, k: float, device: Device, share: float = 1.0, *, float8: bool = False
) -> float:
    """``batch`` products of m x k and k x n in bf16, or of e4m3 to bf16, which reach the same part of their data sheet.

    Example:
        >>> from fourfold.planner.inputs.cluster import preset
        >>> device = preset("dgx-a100").device
        >>> seconds = matmul_s(1, 8192, 8192, 8192, device)
        >>> 0.85 < 2 * 8192**3 / (seconds * device.best_tflops * 1e12) <= 1
        True
    """
    m, n, k = max(1.0, m), max(1.0, n), max(1.0, k)
    best_tflops, operand_bytes = device.best_tflops, 2.0
    if float8:
        best_tflops, operand_bytes = device.best_float8_tflops, 1.0
    reached_s = padded_flops(batch, m, n, k, device.multiprocessors) / (best_tflops * 1e12 * share)
    moved_bytes = batch * (operand_bytes * (m * k + k * n) + 2.0 * m * n)
    return max(reached_s, memory_s(moved_bytes, device), device.launch_us * 1e-6)


@functools.lru_cache(maxsize=1_000_000)
def padded_flops(batch: int, m: float, n: float, k: float, multiprocessors: int) -> float:
    """FLOPs at the best rate that take as long as this matmul: with the idle part of tiles and of the last wave."""
    least = math.inf
    for rows, columns, speed in _TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        for split in _SPLITS:
            if split > 1 and (k / split < 1024 or tiles * split > 2 * multiprocessors):
                break
            waves = math.ceil(tiles * split / multiprocessors)
            least = min(
                least, waves * multiprocessors * 2.0 * rows * columns * (k + split * _RAMP) / (split * speed)
            )
    # The measured best has a ramp of its own: give it back, so that a large cube reaches the best and not less.
    return max(2.0 * batch * m * n * k, least * 8192 / (8192 + _RAMP))


def memory_s(moved_bytes: float, device: Device) -> float:
    """Element-wise work that reads and writes this many bytes."""
    return moved_bytes / (device.memory_tbps * 1e12 * device.memory_share)


def host_copy_s(copied_bytes: float, device: Device) -> float:
    """A copy from the device to pinned memory of the host, or back."""
    return copied_bytes / (device.host_gbps * 1e9 * device.host_share)


def attention_core_s(
    tokens: float,
    length: int,
    features: float,
    heads: float,
    device: Device,
    kernels: Kernels,
    *,
    fused: bool,
) -> tuple[float, float]:
    """(forward, backward) of scores, softmax and values, for ``features`` = heads x head_dim on this rank.

    Fused, the causal half alone is computed, and backward computes the scores again: five products to forward's two
    (arXiv 2307.08691). Not fused, all of it is, and the scores go to memory and back.
    """
    flops = 4.0 * tokens * length * features
    if fused:
        forward_s = 0.5 * flops / (device.best_tflops * 1e12 * kernels.attention_share)
        return forward_s, 2.5 * forward_s
    head_dim = features / heads
    sequences = max(1, round(tokens / length))
    batch = max(1, round(sequences * heads))
    products_s = matmul_s(batch, length, length, head_dim, device, kernels.matmul_share)
    products_s += matmul_s(batch, length, head_dim, length, device, kernels.matmul_share)
    passes_s = memory_s(2.0 * kernels.score_passes * tokens * length * heads, device)
    return products_s + passes_s, 2.0 * products_s + 1.5 * passes_s


# -- single operators of a dry run ------------------------------------------------------------------------------------


_KERNELS = Kernels()


def operation_s(operation: Operation, cluster: Cluster) -> float:
    """Seconds of one operator of a dry run: measured on the cluster where available, else computed.

    Every operator costs what eager PyTorch pays: its own kernel, at least one launch, and all bytes read and written.
    """
    kernels, measured, device = _KERNELS, cluster.measured, cluster.device
    if "empty" in operation.name:  # allocates memory and touches none of it
        return 0.0
    if operation.work == "matmul":
        batch, m, n, k = operation.shape
        per_s = measured.matmul_flops_per_s(m, n, k)
        float8 = "_scaled_mm" in operation.name
        if per_s and not float8:
            seconds = operation.flops / per_s
        else:
            seconds = matmul_s(batch, m, n, k, device, kernels.matmul_share, float8=float8)
    elif operation.work == "attention":
        backward = operation.phase == "backward"
        rate = measured.attention_backward_tflops if backward else measured.attention_forward_tflops
        # The FLOPs are of the whole square, and so is a measured rate; a causal mask leaves half of it to do.
        seconds = operation.flops / ((rate or 2 * device.best_tflops * kernels.attention_share) * 1e12)
    else:
        seconds = memory_s(operation.bytes_moved, device)
    return max(seconds, device.launch_us * 1e-6)
