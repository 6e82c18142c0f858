"""What adapters send: no activation more, and of weights at most two thirds of what a run of all weights sends over z."""

from collections import Counter
from typing import Any

import pytest
from transformers import LlamaConfig

from fourfold import Lora, Overlap
from fourfold.dry_run.events import Start
from fourfold.dry_run.run import dryrun
from fourfold.planner.cost.step import Prices, estimate_with
from fourfold.planner.inputs.cluster import preset
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import from_config

RANK, LENGTH = 4, 64
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1024,
)


def sent(shape: tuple[int, int, int, int], weights: Any, lora: Lora | None, **options: Any) -> list[Start]:
    rows = 2 * shape[0] * shape[1]
    return dryrun(
        CONFIG, shape, sequences=rows, length=LENGTH, weights=weights, lora=lora, trace_all=True, **options
    ).collectives


@pytest.mark.parametrize("weights", ["fsdp2", "streamed"])
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), pytest.param((1, 2, 2, 2), marks=pytest.mark.nightly)])
def test_adapters_send_no_activation_more_and_half_of_the_weights(
    shape: tuple[int, int, int, int], weights: str
) -> None:
    every, adapters = (sent(shape, weights, lora) for lora in (None, Lora(RANK)))

    def activations(collectives: list[Start]) -> Counter[Any]:
        return Counter((c.axis, c.kind, c.payload_bytes) for c in collectives if c.purpose == "activation")

    assert not activations(adapters) - activations(every)
    over_z = [sum(c.payload_bytes for c in some if c.axis == "z") for some in (every, adapters)]
    assert 0 < over_z[1] <= 2 / 3 * over_z[0]
    # The gradients of the adapters, in fp32, and nothing else.
    *_, y, x = shape
    blocks = CONFIG.num_hidden_layers
    elements = from_config(CONFIG.to_dict()).adapted(RANK)
    held = Prices(elements, preset("dgx-h100"), LENGTH).shard(y, x).adapters
    gradients = sum(c.payload_bytes for c in adapters if c.axis == "z" and c.purpose == "gradient")
    assert gradients == pytest.approx(4 * blocks * held, rel=0.02)


def test_dropout_of_adapters_sends_nothing() -> None:
    plain, dropped = (sent((1, 2, 2, 2), "fsdp2", Lora(RANK, dropout=rate)) for rate in (0.0, 0.1))
    assert [(c.axis, c.kind, c.payload_bytes) for c in dropped] == [
        (c.axis, c.kind, c.payload_bytes) for c in plain
    ]


@pytest.mark.parametrize("weights", [pytest.param("fsdp2", marks=pytest.mark.nightly), "streamed"])
def test_packed_weights_are_sent_as_bytes(weights: str) -> None:
    shape = (1, 2, 2, 2)
    # In a bundle, which packed weights are not in, small weights would be gathered once.
    apart = Overlap(bundle_bytes=0)
    plain, packed = (
        [c for c in sent(shape, weights, lora, overlap=apart) if c.axis == "z" and c.purpose == "weight"]
        for lora in (Lora(RANK), Lora(RANK, quantization="nf4"))
    )
    elements = 2 * sum(from_config(CONFIG.to_dict()).block_matrices) * CONFIG.num_hidden_layers / 4
    if weights == "streamed":  # the last linear's stays from forward to backward
        elements -= CONFIG.hidden_size * CONFIG.intermediate_size / 4
    saved = sum(c.payload_bytes for c in plain) - sum(c.payload_bytes for c in packed)
    # In forward and in backward, 4.5 bits instead of bf16 for each number of a block's matrices.
    assert saved == pytest.approx(elements * (2 - 36 / 64), rel=0.01)


@pytest.mark.nightly
def test_half_batches_multiply_no_more_than_a_whole_batch() -> None:
    """Gradients of weights are computed later there: those of frozen weights are not computed at all."""
    flops = []
    for halves in (False, True):
        run = dryrun(
            CONFIG,
            (1, 1, 1, 2),
            sequences=2,
            length=LENGTH,
            weights="streamed",
            lora=Lora(RANK),
            overlap=Overlap(interleave=halves),
            trace_all=True,
        )
        assert run.report.interleaved == halves
        flops.append(sum(o.flops for o in run.operations if o.work == "matmul"))
    assert flops[0] == flops[1]


def test_a_step_of_adapters_is_predicted_to_take_about_two_thirds() -> None:
    workload = from_config(
        {**CONFIG.to_dict(), "hidden_size": 8192, "intermediate_size": 28672, "head_dim": 1024}
    )
    layout = Layout(1, 8, 1, 1, activation_checkpointing="none")
    every, adapters = (
        estimate_with(Prices(one, preset("dgx-h100"), 4096), layout, 8)
        for one in (workload, workload.adapted(16))
    )
    assert 0.62 < adapters.compute_s["matmul"] / every.compute_s["matmul"] < 0.72
    assert adapters.link_s["z"] == pytest.approx(every.link_s["z"] / 2, rel=0.05)
    assert adapters.memory.total_bytes < every.memory.total_bytes
