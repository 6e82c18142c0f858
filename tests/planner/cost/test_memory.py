"""The closed form of a rank's memory against the dry run, which counts every tensor."""

import functools
from dataclasses import replace
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Starcoder2Config,
)

from fourfold import Lora, Overlap
from fourfold.dry_run.run import DryRun, dryrun
from fourfold.planner.cost.memory import memory
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import _GATED, _UNGATED, from_config

BAR = 0.05
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
# Sizes at which blocks, tables, activations and logits all count; a step of each takes a second or two.
MODELS = {
    "llama": LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=4, vocab_size=4000),
    "qwen2, biased and tied": Qwen2Config(hidden_size=384, intermediate_size=1024, num_hidden_layers=3,
                                          num_attention_heads=8, num_key_value_heads=2, vocab_size=6000,
                                          tie_word_embeddings=True, **ENDS),
    "gpt2, learned positions": GPT2Config(n_embd=512, n_layer=3, n_head=8, n_positions=512, vocab_size=5000,
                                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ENDS),
    "starcoder2, no gate": Starcoder2Config(hidden_size=512, intermediate_size=2048, num_hidden_layers=3,
                                            num_attention_heads=8, num_key_value_heads=4, vocab_size=5000,
                                            tie_word_embeddings=False, **ENDS),
    "all heads": LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
                             num_key_value_heads=8, vocab_size=1000),
    "phi3, one matrix": Phi3Config(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
                                   num_key_value_heads=8, vocab_size=1000, pad_token_id=0, **ENDS),
    "wide vocabulary": LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8,
                                   num_key_value_heads=8, vocab_size=50000),
}  # fmt: skip
SEQUENCES, LENGTH = 4, 256  # of one rank's micro-batch

# Every model, grid, way of weights, checkpointing and accumulation is there, each pair of the last three with z.
POINTS = [
    ("llama", Layout(1, 4, 1, 1, 1, "none", weights="fsdp2")),
    ("llama", Layout(1, 4, 1, 1, 1, "full", weights="streamed")),
    ("llama", Layout(1, 4, 1, 1, 2, "full", weights="fsdp2")),
    ("llama", Layout(2, 2, 1, 1, 1, "full", weights="fsdp2")),
    ("llama", Layout(1, 1, 1, 4, 1, "full", weights="fsdp2")),
    ("llama", Layout(1, 2, 2, 2, 2, "none", weights="streamed")),
    ("llama", Layout(1, 1, 1, 1, 1, "none", weights="streamed")),
    ("qwen2, biased and tied", Layout(4, 1, 1, 1, 1, "full", weights="fsdp2")),
    ("qwen2, biased and tied", Layout(1, 1, 4, 1, 1, "none", weights="streamed")),
    ("qwen2, biased and tied", Layout(1, 2, 2, 2, 1, "full", weights="fsdp2")),
    ("gpt2, learned positions", Layout(1, 4, 1, 1, 1, "none", weights="fsdp2")),
    ("gpt2, learned positions", Layout(2, 2, 1, 1, 1, "full", weights="streamed")),
    ("starcoder2, no gate", Layout(1, 2, 2, 2, 1, "none", weights="fsdp2")),
    ("starcoder2, no gate", Layout(1, 1, 1, 4, 1, "full", weights="streamed")),
    ("wide vocabulary", Layout(1, 4, 1, 1, 1, "full", weights="fsdp2")),
    ("wide vocabulary", Layout(2, 2, 2, 2, 1, "none", weights="streamed")),
]
# Two y ranks use one key/value head; inputs that are kept and that come again; the head's gradient is the peak.
TOKENS: dict[str, Any] = {"activations": "sequence-parallel"}
AGAIN = TOKENS | {"keep_inputs": False}
POINTS += [
    ("llama", Layout(1, 1, 2, 4, 1, "none", weights="fsdp2", **TOKENS)),
    ("llama", Layout(1, 2, 2, 2, 2, "none", weights="streamed", **AGAIN)),
    ("all heads", Layout(1, 1, 1, 4, 1, "none", weights="fsdp2", **AGAIN)),
    ("all heads", Layout(1, 1, 1, 4, 1, "none", weights="streamed", **TOKENS)),
    ("phi3, one matrix", Layout(1, 1, 2, 2, 1, "none", weights="fsdp2", **AGAIN)),
    ("phi3, one matrix", Layout(1, 1, 1, 4, 1, "none", weights="fsdp2", **TOKENS)),
    ("phi3, one matrix", Layout(1, 4, 1, 1, 1, "none", weights="fsdp2")),
    ("qwen2, biased and tied", Layout(1, 2, 2, 2, 1, "full", weights="fsdp2", **AGAIN)),
    ("gpt2, learned positions", Layout(1, 1, 2, 2, 1, "none", weights="streamed", **AGAIN)),
    ("starcoder2, no gate", Layout(1, 2, 2, 2, 1, "none", weights="fsdp2", **TOKENS)),
    ("wide vocabulary", Layout(1, 1, 8, 1, 1, "full", weights="streamed", **AGAIN)),
]
# Recomputed partly, or in some blocks only.
RECOMPUTED = [
    ("llama", Layout(1, 4, 1, 1, 1, "selective", weights="fsdp2")),
    ("llama", Layout(1, 4, 1, 1, 1, "full", weights="fsdp2", checkpointed_blocks=2)),
    ("llama", Layout(1, 4, 1, 1, 1, "selective", weights="fsdp2", checkpointed_blocks=1)),
    ("llama", Layout(1, 2, 2, 2, 1, "selective", weights="fsdp2", **TOKENS)),
    ("llama", Layout(1, 1, 1, 4, 1, "selective", weights="streamed")),
    ("qwen2, biased and tied", Layout(1, 2, 2, 2, 1, "selective", weights="fsdp2", **TOKENS)),
    ("gpt2, learned positions", Layout(1, 4, 1, 1, 1, "selective", weights="fsdp2")),
    ("phi3, one matrix", Layout(1, 4, 1, 1, 1, "selective", weights="fsdp2")),
    ("starcoder2, no gate", Layout(1, 1, 1, 4, 1, "selective", weights="streamed")),
]
# Gradients of three micro-batches that are added up in shards.
SHARDS: dict[str, Any] = {"accumulation": "sharded"}
ACCUMULATED = [
    ("llama", Layout(1, 4, 1, 1, 3, "full", weights="fsdp2", **SHARDS)),
    ("llama", Layout(2, 4, 1, 1, 3, "full", weights="fsdp2", **SHARDS)),
    ("llama", Layout(2, 4, 1, 1, 3, "full", weights="streamed", **SHARDS)),
    ("llama", Layout(1, 2, 2, 2, 3, "selective", weights="fsdp2", **SHARDS, **TOKENS)),
    ("qwen2, biased and tied", Layout(2, 2, 1, 2, 3, "selective", weights="fsdp2", **SHARDS, **TOKENS)),
    ("wide vocabulary", Layout(1, 4, 1, 1, 3, "full", weights="fsdp2", **SHARDS)),
]
# Adapters of rank 16 are trained, and the weights frozen.
ADAPTED = [
    ("llama", Layout(1, 4, 1, 1, 1, "none", weights="fsdp2")),
    ("llama", Layout(1, 4, 1, 1, 1, "full", weights="streamed")),
    ("llama", Layout(1, 2, 2, 2, 1, "selective", weights="fsdp2", **TOKENS)),
    ("llama", Layout(1, 1, 1, 4, 1, "none", weights="streamed", **TOKENS)),
    ("llama", Layout(2, 2, 1, 2, 3, "full", weights="fsdp2", **SHARDS)),
    ("qwen2, biased and tied", Layout(1, 2, 2, 2, 1, "full", weights="fsdp2", **AGAIN)),
    ("wide vocabulary", Layout(1, 4, 1, 1, 1, "full", weights="fsdp2")),
    ("gpt2, learned positions", Layout(1, 4, 1, 1, 1, "none", weights="fsdp2")),
]
# Inputs of recomputed blocks that are on the host; with these sequences they are a part of the peak.
OFFLOADED = [
    ("llama", Layout(1, 4, 1, 1, 1, "full", weights="fsdp2"), 16),
    ("llama", Layout(1, 4, 1, 1, 1, "full", weights="fsdp2", checkpointed_blocks=2), 16),
    ("llama", Layout(1, 4, 1, 1, 1, "selective", weights="fsdp2", checkpointed_blocks=3), 16),
    ("llama", Layout(1, 2, 2, 2, 3, "selective", weights="fsdp2", **SHARDS, **TOKENS), 16),
    ("llama", Layout(1, 1, 1, 4, 1, "full", weights="streamed"), 16),
    ("qwen2, biased and tied", Layout(1, 2, 2, 2, 1, "full", weights="fsdp2", **AGAIN), 16),
]
# Ranks of z that share sequences; keys and values, and their gradients, are those of whole sequences.
SHARED = [
    ("llama", Layout(1, 4, 1, 1, 1, "full", weights="fsdp2", sequence_ranks=4)),
    ("llama", Layout(1, 2, 2, 2, 1, "selective", weights="fsdp2", **TOKENS, sequence_ranks=2)),
    ("llama", Layout(1, 4, 1, 1, 1, "none", weights="fsdp2", sequence_ranks=2)),
    ("llama", Layout(2, 4, 1, 1, 3, "full", weights="fsdp2", **SHARDS, sequence_ranks=4)),
    ("llama", Layout(1, 8, 1, 2, 1, "full", weights="fsdp2", **TOKENS, sequence_ranks=8)),
    ("all heads", Layout(1, 8, 1, 1, 1, "full", weights="fsdp2", sequence_ranks=8)),
    (
        "qwen2, biased and tied",
        Layout(1, 4, 1, 2, 1, "selective", weights="fsdp2", **TOKENS, sequence_ranks=4),
    ),
    ("starcoder2, no gate", Layout(1, 4, 1, 1, 1, "full", weights="fsdp2", sequence_ranks=4)),
    ("wide vocabulary", Layout(1, 4, 1, 1, 1, "none", weights="streamed", sequence_ranks=4)),
]


@functools.cache
def dry_run(
    model: str, layout: Layout, optimizer: Any = "adamw", sequences: int = SEQUENCES, lora: Lora | None = None
) -> DryRun:
    return dryrun(
        MODELS[model],
        layout.grid,
        sequences=sequences * layout.micro_batches * layout.data * layout.z,
        length=LENGTH,
        micro_batches=layout.micro_batches,
        activations=layout.activations,
        activation_checkpointing=layout.activation_checkpointing,
        checkpointed_blocks=layout.checkpointed_blocks,
        weights=layout.weights,
        accumulation=layout.accumulation,
        overlap=Overlap(keep_inputs=layout.keep_inputs),
        activation_offloading=layout.activation_offloading,
        sequence_ranks=layout.sequence_ranks,
        optimizer=optimizer,
        lora=lora,
    )


# One point of each model for every change: its first layout.
EVERY_CHANGE = {point[0]: point for point in reversed(POINTS)}.values()


@pytest.mark.parametrize(
    ("model", "layout"),
    [point if point in EVERY_CHANGE else pytest.param(*point, marks=pytest.mark.nightly) for point in POINTS],
    ids=str,
)
def test_the_closed_form_is_the_dry_run(model, layout):
    closed = memory(from_config(MODELS[model].to_dict()), layout, SEQUENCES * LENGTH, length=LENGTH)
    assert closed.total_bytes == pytest.approx(dry_run(model, layout).peak.bytes, rel=BAR), closed


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *RECOMPUTED[:2],
        ACCUMULATED[0],
        *(pytest.param(*point, marks=pytest.mark.nightly) for point in RECOMPUTED[2:] + ACCUMULATED[1:]),
    ],
    ids=str,
)
def test_the_closed_form_is_the_dry_run_within_three_percent(model, layout):
    closed = memory(from_config(MODELS[model].to_dict()), layout, SEQUENCES * LENGTH, length=LENGTH)
    assert closed.total_bytes == pytest.approx(dry_run(model, layout).peak.bytes, rel=0.03), closed


@pytest.mark.parametrize(
    ("model", "layout"),
    [*ADAPTED[:3], *(pytest.param(*point, marks=pytest.mark.nightly) for point in ADAPTED[3:])],
    ids=str,
)
def test_the_closed_form_knows_adapters(model, layout):
    workload = from_config(MODELS[model].to_dict()).adapted(16)
    closed = memory(workload, layout, SEQUENCES * LENGTH, length=LENGTH)
    done = dry_run(model, layout, lora=Lora(16)).peak
    assert closed.total_bytes == pytest.approx(done.bytes, rel=0.03), closed
    assert closed.parameters_bytes == pytest.approx(done.by_category["parameters"], rel=0.005)
    assert closed.optimizer_bytes == pytest.approx(done.by_category["optimizer"], rel=0.005)


@pytest.mark.parametrize(
    ("model", "layout"),
    [ADAPTED[0], *(pytest.param(*point, marks=pytest.mark.nightly) for point in ADAPTED[1:5])],
    ids=str,
)
def test_the_closed_form_knows_packed_weights(model, layout):
    workload = from_config(MODELS[model].to_dict()).adapted(16, "nf4")
    closed = memory(workload, layout, SEQUENCES * LENGTH, length=LENGTH)
    done = dry_run(model, layout, lora=Lora(16, quantization="nf4")).peak
    assert closed.total_bytes == pytest.approx(done.bytes, rel=0.03), closed
    assert closed.parameters_bytes == pytest.approx(done.by_category["parameters"], rel=0.005)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "layout", "sequences"),
    OFFLOADED,
    ids=str,
)
def test_the_closed_form_knows_what_offloading_saves(model, layout, sequences):
    workload = from_config(MODELS[model].to_dict())
    kept, offloaded = (
        (memory(workload, one, sequences * LENGTH, length=LENGTH), dry_run(model, one, sequences=sequences))
        for one in (layout, replace(layout, activation_offloading=True))
    )
    closed, done = offloaded
    assert closed.total_bytes == pytest.approx(done.peak.bytes, rel=0.03), closed
    assert done.peak.bytes < kept[1].peak.bytes
    saved = kept[0].total_bytes - closed.total_bytes
    assert saved == pytest.approx(kept[1].peak.bytes - done.peak.bytes, abs=0.01 * done.peak.bytes)


@pytest.mark.parametrize(
    ("model", "layout"),
    [*SHARED[:2], *(pytest.param(*point, marks=pytest.mark.nightly) for point in SHARED[2:])],
    ids=str,
)
def test_the_closed_form_knows_shared_sequences(model, layout):
    closed = memory(from_config(MODELS[model].to_dict()), layout, SEQUENCES * LENGTH, length=LENGTH)
    assert closed.total_bytes == pytest.approx(dry_run(model, layout).peak.bytes, rel=0.03), closed


def of_family(family: str) -> PreTrainedConfig:
    """Sizes in the words of each family."""
    sizes = {
        ("hidden_size", "n_embd", "d_model"): 512,
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers"): 4,
        ("num_attention_heads", "n_head", "n_heads", "num_heads"): 8,
        ("attention_types",): [[["global", "local"], 2]],
        ("num_key_value_heads",): 4,
        ("head_dim",): 64,
        ("intermediate_size", "ffn_dim"): 1408,
        ("vocab_size",): 4000,
    }
    known = AutoConfig.for_model(family).to_dict()
    values = {name: value for names, value in sizes.items() for name in names if name in known}
    if (
        family == "gpt_neo"
    ):  # each block has a mask of positions x positions, which would be the most of a small model
        values["max_position_embeddings"] = LENGTH
    values |= {
        name: 0 if name.endswith("_token_id") else 0.0
        for name, value in known.items()
        if name.endswith("_token_id") or ("drop" in name and isinstance(value, float))
    }
    return AutoConfig.for_model(family, **values)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "gemma2",
        *(pytest.param(family, marks=pytest.mark.nightly) for family in sorted({*_GATED, *_UNGATED})),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_the_closed_form_knows_what_other_families_keep(family, precision):
    # Four temporaries of bloom's own GELU are the peak in fp32, which is 9 % above the closed form.
    bar = 0.1 if (family, precision) == ("bloom", "fp32") else BAR
    config, layout = of_family(family), Layout(1, 4, 1, 1, weights="fsdp2")
    done = dryrun(
        config, layout.grid, sequences=16, length=LENGTH, weights="fsdp2", precision=precision,
        activation_checkpointing="none",
    )  # fmt: skip
    work_bytes = 2 if precision == "bf16" else 4
    workload = from_config(config.to_dict())
    closed = memory(workload, layout, SEQUENCES * LENGTH, work_bytes=work_bytes, length=LENGTH)
    assert closed.total_bytes == pytest.approx(done.peak.bytes, rel=bar), closed


@pytest.mark.parametrize(
    ("family", "attention", "layout"),
    [
        ("gemma2", "auto", Layout(1, 4, 1, 1, 1, "selective")),
        *(
            pytest.param(*point, marks=pytest.mark.nightly)
            for point in (
                ("gemma2", "auto", Layout(1, 4, 1, 1)),
                ("gemma2", "auto", Layout(1, 4, 1, 1, 1, "full")),
                ("gemma2", "auto", Layout(1, 2, 2, 2, 1, "selective", **TOKENS)),
                ("llama", "flex", Layout(1, 4, 1, 1, 1, "selective")),
                ("llama", "flex", Layout(1, 2, 2, 2, 1, "none", **AGAIN)),
            )
        ),
    ],
    ids=str,
)
def test_the_closed_form_knows_flex_attention(family, attention, layout):
    config, length = of_family(family), 4 * LENGTH
    done = dryrun(
        config, layout.grid, sequences=SEQUENCES * layout.z, length=length, weights="fsdp2", attention=attention,
        activation_checkpointing=layout.activation_checkpointing, activations=layout.activations,
        overlap=Overlap(keep_inputs=layout.keep_inputs),
    )  # fmt: skip
    assert "FlexAttention" in done.report.notes[-1]
    # Unlike other attention it is computed again in a selective block.
    again = [e for e in done.operations if e.work == "attention" and e.phase == "recompute"]
    assert bool(again) == (layout.activation_checkpointing != "none")
    workload = from_config(config.to_dict())
    closed = memory(workload.attended(attention, "cuda", "bf16"), layout, SEQUENCES * length, length=length)
    assert closed.total_bytes == pytest.approx(done.peak.bytes, rel=0.03), closed
    if family == "gemma2":  # otherwise it keeps scores of length x length
        masked = memory(
            workload.attended("masked", "cuda", "bf16"), layout, SEQUENCES * length, length=length
        )
        assert masked.total_bytes > 1.3 * closed.total_bytes


@pytest.mark.parametrize("family", ["exaone4", "glm4", "olmo2"])
@pytest.mark.nightly
def test_the_closed_form_knows_the_output_that_a_norm_needs(family):
    config, layout = of_family(family), Layout(1, 4, 1, 1, 1, "selective")
    done = dryrun(
        config, layout.grid, sequences=16, length=4 * LENGTH, weights="fsdp2", activation_checkpointing="selective"
    )  # fmt: skip
    closed = memory(from_config(config.to_dict()), layout, SEQUENCES * 4 * LENGTH, length=4 * LENGTH)
    assert closed.total_bytes == pytest.approx(done.peak.bytes, rel=0.03), closed


@pytest.mark.nightly
def test_a_deep_model_is_no_further_off():
    config = LlamaConfig(**{**MODELS["llama"].to_dict(), "num_hidden_layers": 24})
    layout = Layout(1, 8, 1, 2, 1, "full")
    options = {"activation_checkpointing": "full", "activations": "replicated"}
    done = dryrun(config, layout.grid, sequences=32, length=LENGTH, **options)
    closed = memory(from_config(config.to_dict()), layout, SEQUENCES * LENGTH, length=LENGTH)
    assert closed.total_bytes == pytest.approx(done.peak.bytes, rel=BAR), closed


# In the last two the full matrices of Muon's step are the peak.
MUON_POINTS = [
    ("llama", Layout(1, 4, 1, 1)),
    ("llama", Layout(1, 2, 2, 2, 1, "full", weights="streamed")),
    ("all heads", Layout(1, 1, 2, 4, 1, "full")),
    ("gpt2, learned positions", Layout(1, 2, 2, 2, 1, "full")),
]


@pytest.mark.parametrize("sequences", [4, 1])
def test_the_closed_form_of_adamw_with_moments_in_bf16_is_its_dry_run(sequences):
    layout = Layout(1, 4, 1, 1)
    workload = from_config(MODELS["llama"].to_dict())
    narrow, wide = (
        memory(workload, layout, sequences * LENGTH, optimizer=o, length=LENGTH)
        for o in ("adamw-bf16", "adamw")
    )
    done = dry_run("llama", layout, "adamw-bf16", sequences)
    assert narrow.total_bytes == pytest.approx(done.peak.bytes, rel=BAR), (narrow, done.peak)
    assert done.trace.before["optimizer"] == pytest.approx(wide.parameters_bytes, rel=0.001)


@pytest.mark.parametrize(
    ("model", "layout"),
    [MUON_POINTS[0], *(pytest.param(*point, marks=pytest.mark.nightly) for point in MUON_POINTS[1:])],
    ids=str,
)
def test_the_closed_form_of_muon_is_its_dry_run(model, layout):
    sequences = 4 if layout in (MUON_POINTS[0][1], MUON_POINTS[1][1]) else 1
    workload = from_config(MODELS[model].to_dict())
    muon, adamw = (
        memory(workload, layout, sequences * LENGTH, optimizer=o, length=LENGTH) for o in ("muon", "adamw")
    )
    done = dry_run(model, layout, "muon", sequences)
    assert muon.total_bytes == pytest.approx(done.peak.bytes, rel=BAR), (muon, done.peak)
    is_in_step = done.trace.events[done.peak.event].phase == "optimizer"
    assert is_in_step == (muon.moment == "the optimizer's step") == (sequences == 1)
    if is_in_step:
        assert muon.optimizer_bytes == pytest.approx(done.peak.by_category["optimizer"], rel=BAR)
        return
    # One momentum instead of two moments of every matrix in a block.
    assert muon.optimizer_bytes == pytest.approx(done.trace.before["optimizer"], rel=0.001)
    matrices = workload.layers * sum(workload.block_matrices) / layout.ranks
    assert adamw.optimizer_bytes - muon.optimizer_bytes == pytest.approx(4 * matrices)
