"""The dry run of float8: the collectives and the memory of the real run, the FLOPs of every matmul, the errors of GPUs."""

from collections import Counter
from typing import Any

import pytest

from benchmarks import dryrun as benchmark
from benchmarks.ranks import RankPool
from fourfold.dry_run.run import DryRun, dryrun
from fourfold.errors import UnsupportedError
from tests.dry_run.test_run import config

RECIPE = "rowwise_with_gw_hp"


@pytest.mark.parametrize(
    ("shape", "weights", "activations"),
    [
        pytest.param((1, 1, 2, 2), "streamed", "sequence-parallel", marks=pytest.mark.nightly),
        pytest.param((2, 2, 1, 1), "fsdp2", "replicated", marks=pytest.mark.nightly),
        pytest.param((1, 2, 2, 2), "fsdp2", "sequence-parallel", marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 4), "streamed", "replicated", marks=pytest.mark.nightly),
    ],
)
def test_it_equals_the_real_run(pool: RankPool, shape: Any, weights: Any, activations: Any) -> None:
    same, off = benchmark.compare(pool, shape, weights, "bf16", activations, float8=RECIPE)
    assert same
    assert abs(off) <= benchmark.MEMORY_BAR


def run(shape: Any, float8: str = RECIPE, **changes: Any) -> DryRun:
    options = {"sequences": 4, "length": 32, **changes}
    return dryrun(config(num_hidden_layers=2), shape, float8=float8, **options)


def test_the_flops_are_those_of_a_step_without() -> None:
    flops: dict[str, Counter[bool]] = {}
    for float8 in ("none", RECIPE):
        found = flops[float8] = Counter()
        for event in run((1, 1, 1, 1), float8).operations:
            if event.work == "matmul":
                found["_scaled_mm" in event.name] += int(event.flops)
    assert flops["none"][True] == 0
    assert sum(flops[RECIPE].values()) == flops["none"][False]
    # q and o, k and v, gate, up and down: outputs and gradients of inputs, of two blocks and 128 tokens.
    features = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert flops[RECIPE][True] == 2 * 2 * 2 * features * 128


@pytest.mark.parametrize("activations", ["replicated", "sequence-parallel"])
def test_the_largest_magnitudes_are_in_the_traffic(activations: str) -> None:
    """In each block: of tokens and of rows of weights over the axis that shards the input, of tokens over the other in backward."""
    sent: Counter[str] = Counter()
    for start in run((1, 1, 2, 2), activations=activations, weights="fsdp2").collectives:
        if start.purpose == "scale":
            assert start.kind == "all_reduce"
            sent[start.axis] += int(start.payload_bytes)
    tokens, wide = 4 * 32, 2
    # (axes of input and output features, widths of the outputs on a rank)
    groups = (("y", "x", (32, 16, 16)), ("x", "y", (32,)), ("y", "x", (64, 64)), ("x", "y", (32,)))
    right: Counter[str] = Counter()
    for in_axis, out_axis, widths in groups:
        right[in_axis] += 2 * wide * (tokens + sum(widths) + len(widths))
        right[out_axis] += 2 * wide * len(widths) * (tokens + 1)
    assert sent == right


def test_sizes_that_a_gpu_cannot_multiply_are_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"q_proj multiplies 8 of its 32 output features at once on x=4, y=1.*multiple of 16; use a smaller x",
    ):
        dryrun(
            config(num_key_value_heads=4, hidden_size=64, head_dim=8),
            (1, 1, 1, 4),
            sequences=4,
            length=32,
            float8=RECIPE,
        )


def test_fp32_on_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='fp32'.*use precision='bf16'"):
        run((1, 1, 1, 1), precision="fp32")
