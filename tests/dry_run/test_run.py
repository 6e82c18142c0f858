"""The dry run equals the real run: the same collectives, the same memory, the same errors, at any size."""

import json
import math
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
from transformers import GraniteSWAConfig, LlamaConfig, OPTConfig, Qwen2Config

from benchmarks import dryrun as benchmark
from fourfold.cli.main import main
from fourfold.dry_run.events import Operation, Start, Wait
from fourfold.dry_run.run import DryRun, dryrun
from fourfold.errors import UnsupportedError
from fourfold.optim import adamw_bf16
from fourfold.parallel.loss import chunk_size


def config(**changes) -> LlamaConfig:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
    }
    return LlamaConfig(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("shape", "weights", "precision", "activations"),
    [
        ((1, 1, 2, 2), "streamed", "fp32", "sequence-parallel"),
        ((2, 2, 1, 1), "fsdp2", "fp32", "replicated"),
        pytest.param((1, 1, 2, 4), "streamed", "fp32", "replicated", marks=pytest.mark.nightly),
        pytest.param((2, 2, 1, 2), "streamed", "bf16", "replicated", marks=pytest.mark.nightly),
        pytest.param((1, 4, 2, 1), "fsdp2", "fp32", "replicated", marks=pytest.mark.nightly),
        pytest.param((1, 2, 2, 2), "fsdp2", "bf16", "replicated", marks=pytest.mark.nightly),
        pytest.param((8, 1, 1, 1), "streamed", "fp32", "replicated", marks=pytest.mark.nightly),
        pytest.param((1, 2, 2, 2), "streamed", "bf16", "sequence-parallel", marks=pytest.mark.nightly),
        pytest.param((1, 1, 2, 4), "fsdp2", "fp32", "sequence-parallel", marks=pytest.mark.nightly),
    ],
)
def test_dry_run_equals_the_real_run(pool, shape, weights, precision, activations):
    same, off = benchmark.compare(pool, shape, weights, precision, activations)
    assert same
    assert abs(off) <= benchmark.MEMORY_BAR


def whole_and_expanded(blocks: int, shape: Any, **options: Any) -> tuple[DryRun, DryRun]:
    """The dry run of every block and micro-batch, and that of a few of them."""
    whole, expanded = (
        dryrun(config(num_hidden_layers=blocks), shape, length=32, trace_all=trace_all, **options)
        for trace_all in (True, False)
    )
    assert whole.blocks_traced is None
    assert memory(expanded) == memory(whole)
    return whole, expanded


def memory(run: DryRun) -> list[float]:
    """The bytes that tensors take up to and with each event."""
    changes = [sum(size for _, size in of_event) for of_event in run.trace.changes]
    return list(accumulate(changes, initial=sum(run.trace.before.values())))


@pytest.mark.parametrize(
    ("checkpointing", "activations", "weights"),
    [
        pytest.param("none", "replicated", "fsdp2", marks=pytest.mark.nightly),
        pytest.param("full", "sequence-parallel", "streamed", marks=pytest.mark.nightly),
        pytest.param("none", "replicated", "streamed", marks=pytest.mark.nightly),
        pytest.param("full", "replicated", "streamed", marks=pytest.mark.nightly),
        pytest.param("full", "replicated", "fsdp2", marks=pytest.mark.nightly),
        pytest.param("full", "sequence-parallel", "fsdp2", marks=pytest.mark.nightly),
    ],
)
def test_expanded_trace_equals_the_trace_of_trace_all(weights, checkpointing, activations):
    whole, expanded = whole_and_expanded(
        7,
        (2, 2, 2, 2),
        sequences=16,
        weights=weights,
        activations=activations,
        activation_checkpointing=checkpointing,
        target="cpu",
    )
    assert expanded.blocks_traced == (3, 7)
    assert expanded.trace.events == list(whole.trace.events)
    assert expanded.peak == whole.peak
    assert expanded.trace.before == whole.trace.before


@pytest.mark.nightly
def test_moments_in_bf16_are_updated_block_by_block(monkeypatch):
    monkeypatch.setattr(adamw_bf16, "PART", 1000)  # several parts of a matrix
    whole, expanded = whole_and_expanded(
        7, (1, 2, 1, 1), sequences=2, weights="fsdp2", optimizer="adamw-bf16"
    )
    assert expanded.blocks_traced == (3, 7)
    assert expanded.trace.events == list(whole.trace.events)
    assert expanded.peak == whole.peak


@pytest.mark.parametrize(
    ("shape", "weights"),
    [((1, 2, 2, 2), "fsdp2"), pytest.param((1, 2, 1, 2), "streamed", marks=pytest.mark.nightly)],
)
def test_repeated_chunks_of_the_loss_equal_those_that_are_traced_one_by_one(monkeypatch, shape, weights):
    monkeypatch.setattr(chunk_size, "CHUNK_BYTES", 2_500)
    whole, repeated = whole_and_expanded(
        2, shape, sequences=24, micro_batches=2, weights=weights, activations="sequence-parallel"
    )
    of_head = [e for e in whole.operations if e.module == "lm_head" and e.work == "matmul"]
    assert len(of_head) > 2 * 3 * 5, "more chunks than are traced"
    assert list(repeated.trace.events) == list(whole.trace.events)
    assert repeated.peak == whole.peak


@pytest.mark.parametrize(
    ("count", "shape", "weights", "kind", "offloads"),
    [
        pytest.param(8, (1, 2, 1, 1), "fsdp2", "selective", False, marks=pytest.mark.nightly),
        pytest.param(10, (1, 2, 1, 1), "fsdp2", "selective", True, marks=pytest.mark.nightly),
        pytest.param(0, (1, 2, 1, 1), "fsdp2", "selective", False, marks=pytest.mark.nightly),
        pytest.param(5, (2, 2, 1, 2), "fsdp2", "full", True, marks=pytest.mark.nightly),
        pytest.param(5, (1, 2, 2, 1), "streamed", "full", False, marks=pytest.mark.nightly),
        pytest.param(4, (1, 2, 2, 2), "fsdp2", "selective", True, marks=pytest.mark.nightly),
        pytest.param(10, (1, 2, 2, 1), "streamed", "full", True, marks=pytest.mark.nightly),
    ],
)
def test_blocks_that_are_partly_recomputed_are_two_lists_of_like_blocks(
    count, shape, weights, kind, offloads
):
    whole, expanded = whole_and_expanded(
        10,
        shape,
        sequences=16,
        micro_batches=2,
        weights=weights,
        activation_checkpointing=kind,
        checkpointed_blocks=count,
        activation_offloading=offloads,
    )
    copied = Counter(e.kind for e in whole.trace.events if isinstance(e, Start) and e.axis == "host")
    # Of two micro-batches; the last input is still on the device.
    recomputed = 10 if kind == "full" else count
    expected = {"to_host": 2 * recomputed, "to_device": 2 * (recomputed - 1)}
    assert copied == (expected if offloads else {})
    assert expanded.blocks_traced == (3 if count in (0, 10) else 5, 10)
    assert expanded.trace.events == list(whole.trace.events)
    assert expanded.peak == whole.peak


@pytest.mark.parametrize(
    ("weights", "checkpointing", "target"),
    [
        ("fsdp2", "full", "cuda"),
        pytest.param("streamed", "none", "cpu", marks=pytest.mark.nightly),
        pytest.param("streamed", "full", "cuda", marks=pytest.mark.nightly),
        pytest.param("fsdp2", "none", "cpu", marks=pytest.mark.nightly),
    ],
)
def test_repeated_micro_batches_equal_those_that_are_traced_one_by_one(weights, checkpointing, target):
    whole, repeated = whole_and_expanded(
        2,
        (2, 2, 1, 2),
        sequences=24,
        micro_batches=6,
        weights=weights,
        activation_checkpointing=checkpointing,
        target=target,
    )
    assert (whole.left_out, repeated.left_out) == (0, 3)
    assert list(repeated.trace.events) == list(whole.trace.events)
    assert list(repeated.trace.changes) == list(whole.trace.changes)
    assert repeated.peak == whole.peak
    assert repeated.trace.before == whole.trace.before


@pytest.mark.nightly
def test_operators_by_which_dtensor_infers_shapes_are_not_recorded():
    """They run once, on whole fake tensors: two shallow copies of the model would differ by them."""
    run = dryrun(
        config(num_hidden_layers=8),
        (1, 2, 1, 2),
        sequences=4,
        length=32,
        micro_batches=2,
        weights="fsdp2",
        activations="sequence-parallel",
    )
    assert run.blocks_traced == (3, 8)
    assert run.peak.by_category["gradients"] > 0
    casts = [o.shape for o in run.operations if o.name == "aten._to_copy.default" and o.phase == "backward"]
    assert max(map(math.prod, casts)) <= 64 * 128 // 2  # half of the largest weight


@pytest.mark.nightly
def test_blocks_of_two_kinds_in_turns_are_traced_by_the_pair():
    kinds = ["sliding_attention", "full_attention"] * 6
    sizes = config(num_hidden_layers=12).to_dict()
    mixed = Qwen2Config(**{**sizes, "layer_types": kinds, "use_sliding_window": True, "sliding_window": 8})
    runs = [
        dryrun(mixed, (1, 2, 1, 2), sequences=4, length=32, trace_all=trace_all)
        for trace_all in (True, False)
    ]
    assert runs[1].blocks_traced == (6, 12)
    assert runs[1].trace.events == list(runs[0].trace.events)
    assert runs[1].peak == runs[0].peak


def test_matmuls_have_the_flops_of_the_model():
    tokens, layers = 4 * 32, 3
    result = dryrun(config(num_hidden_layers=layers), (1, 1, 1, 1), sequences=4, length=32, precision="fp32")
    weights = layers * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 96
    flops = {phase: sum(o.flops for o in result.operations if o.phase == phase and o.work == "matmul")
             for phase in ("forward", "backward")}  # fmt: skip
    assert flops == {"forward": 2 * tokens * weights, "backward": 4 * tokens * weights}


def test_each_wait_is_for_a_collective_that_started():
    small = config(num_hidden_layers=2)
    result = dryrun(small, (1, 2, 2, 2), sequences=8, length=32, weights="streamed", target="cpu")
    under_way: dict[tuple[str, ...], int] = {}
    for event in result.trace.events:
        if isinstance(event, Operation):
            continue
        words = (event.axis, event.kind, event.purpose, event.module)
        under_way[words] = under_way.get(words, 0) + (1 if isinstance(event, Start) else -1)
        assert under_way[words] >= 0 or not isinstance(event, Wait)
    assert set(under_way.values()) == {0}


@pytest.mark.parametrize(
    ("shape", "sequences", "words"),
    [
        ((1, 1, 1, 3), 8, "x=3 does not divide num_attention_heads=4"),
        ((3, 1, 1, 1), 8, "does not divide"),
        ((1, 1, 1, 2), 0, "global batch"),
    ],
)
def test_a_dry_run_raises_the_errors_of_the_real_start(shape, sequences, words):
    with pytest.raises(ValueError, match=words):
        dryrun(config(), shape, sequences=sequences, length=32)


def test_the_command_shows_the_role_of_each_module(tmp_path, capsys):
    config(num_hidden_layers=2).save_pretrained(tmp_path)
    words = ["dryrun", str(tmp_path), "--grid", "1,2,1,2", "--global-batch-size", "4", "--seq-len", "16"]
    assert main([*words, "--roles"]) == 0
    said = capsys.readouterr().out
    assert "model.layers.*.self_attn.q_proj" in said
    assert "this rank stores" in said


def test_the_command_takes_a_run_config(tmp_path, capsys):
    """Its grid, batch and engine; a layout is chosen if it sets none; options replace what it says."""
    config(num_hidden_layers=2).save_pretrained(tmp_path)
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    file.write_text(
        f"model = {{config = '{tmp_path}'}}\ndata = {{sources = [{{path = 't'}}], sequence_length = 16}}\nbatch = {{tokens = 256}}\n"
        "evaluation = {sequences = 4}\n"
    )
    assert main(["dryrun", str(file)]) == 2
    assert "sets no grid; give the number of ranks with --gpus" in capsys.readouterr().err
    grids = {}
    for words in (["--gpus", "4"], ["--set", "grid.x=2"], ["--grid", "2,1,1,2"]):
        assert main(["dryrun", str(file), *words, "--json", str(out)]) == 0
        grids[words[1]] = tuple(json.loads(out.read_text())["grid"].values())
    assert grids == {"4": (1, 4, 1, 1), "grid.x=2": (1, 1, 1, 2), "2,1,1,2": (2, 1, 1, 2)}
    words = [
        "--set",
        "grid.x=2",
        "--set",
        "batch.micro_batch_sequences=4",
        "--activation-checkpointing",
        "full",
    ]
    assert main(["dryrun", str(file), *words, "--json", str(out)]) == 0
    events = json.loads(out.read_text())["events"]
    lookups = [e for e in events if e["event"] == "operation" and "embedding.default" in e["name"]]
    assert len(lookups) == 4  # 16 sequences, 4 at a time
    assert any(e["phase"] == "recompute" for e in events)
    assert main(["dryrun", str(tmp_path), "--gpus", "4"]) == 2


def test_the_command_says_what_was_decided_and_what_has_no_effect(tmp_path, capsys):
    """A plan's choice can be dry-run: inputs that come again, and weights that stay."""
    config(num_hidden_layers=1, hidden_size=512, intermediate_size=1024).save_pretrained(tmp_path)
    words = ["dryrun", str(tmp_path), "--grid", "1,2,1,2", "--global-batch-size", "4", "--seq-len", "16"]
    out = tmp_path / "out.json"
    found = {}
    for name, more in {
        "usual": ["--weights", "streamed"],
        "again": ["--weights", "streamed", "--no-keep-inputs"],
        "kept weights": ["--weights", "streamed", "--keep-weights-bytes", str(2**30)],
        "idle": [
            "--activations",
            "replicated",
            "--no-keep-inputs",
            "--weights",
            "fsdp2",
            "--keep-weights-bytes",
            "5",
        ],
    }.items():
        assert main([*words, *more, "--json", str(out)]) == 0
        found[name] = json.loads(out.read_text()), capsys.readouterr().out
    counts = {n: Counter(e.get("purpose") for e in done["events"]) for n, (done, _) in found.items()}
    assert found["usual"][0]["activations"] == "sequence-parallel"
    assert "activations: sequence-parallel" in found["usual"][1]
    assert "has no effect" not in found["usual"][1]
    assert counts["again"]["regather"] > 0 == counts["usual"]["regather"]
    assert 0 < counts["kept weights"]["weight"] < counts["usual"]["weight"]
    assert "Overlap(keep_inputs=False) has no effect with replicated activations" in found["idle"][1]
    assert "Overlap(keep_bytes=5) has no effect with fsdp2 weights" in found["idle"][1]


def test_code_that_reads_a_tensor_value_is_named():
    """OPT draws whether to leave a layer out."""
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "layerdrop": 0.1,
    }
    config = OPTConfig(**sizes, max_position_embeddings=32, word_embed_proj_dim=32)
    with pytest.raises(ValueError, match=r"OPTForCausalLM reads .*modeling_opt.py:\d+: if .*simulate 0"):
        dryrun(config, (1, 1, 1, 2), sequences=2, length=16)


def test_a_config_that_asks_for_bf16_weights_trains_fp32_master_weights(tmp_path):
    """As the configs on the hub do."""
    path = tmp_path / "config.json"
    small = config(num_hidden_layers=1)
    path.write_text(json.dumps(small.to_dict() | {"dtype": "bfloat16"}))
    usual, asked = (dryrun(c, (1, 2, 1, 1), sequences=2, length=8) for c in (small, path))
    assert asked.trace == usual.trace


def test_a_config_that_is_not_there_is_named_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"there is no config .*none\.json"):
        dryrun(tmp_path / "none.json", (1, 1, 1, 1), sequences=1, length=8)


def test_a_process_that_is_a_rank_is_rejected(pool):
    for rank, said in enumerate(pool.run(dry_run_error_on_a_rank, 2)):
        assert f"rank {rank} of 2 already" in said
        assert "another process" in said


def dry_run_error_on_a_rank() -> str:
    try:
        dryrun(config(), (1, 1, 1, 2), sequences=2, length=8)
    except ValueError as error:
        return str(error)
    return ""


def test_a_mask_of_packed_documents_is_counted():
    def run(attention: str):
        sizes = {"sequences": 1, "length": 512, "precision": "bf16", "weights": "fsdp2"}
        return dryrun(config(num_hidden_layers=2), (1, 1, 1, 1), **sizes, attention=attention)

    by_bounds, chosen, masked = (run(attention) for attention in ("varlen", "auto", "masked"))
    assert chosen.peak == by_bounds.peak
    # One mask serves both layers, if nothing else repeats it: length x length, as boolean or in bf16.
    assert masked.peak.bytes >= by_bounds.peak.bytes + 512 * 512
    assert "mask of length x length" in masked.report.notes[-1]
    assert "by the bounds" in chosen.report.notes[-1]


def test_sinks_are_followed_without_scores():
    sizes = {"sequences": 1, "length": 512, "weights": "fsdp2"}
    sinks = GraniteSWAConfig(
        **config(num_hidden_layers=2, head_dim=16).to_dict() | {"model_type": "granite_swa"}
    )
    flex, masked = (
        dryrun(sinks, (1, 1, 1, 1), **sizes, attention=attention) for attention in ("auto", "masked")
    )
    assert "FlexAttention" in flex.report.notes[-1]
    assert masked.peak.bytes > flex.peak.bytes + 2 * 4 * 512 * 512  # scores of four heads


def test_an_attention_that_the_model_cannot_have_is_rejected():
    sinks = GraniteSWAConfig(**config(num_hidden_layers=2).to_dict() | {"model_type": "granite_swa"})
    with pytest.raises(UnsupportedError, match="needs another attention than 'varlen'"):
        dryrun(sinks, (1, 1, 1, 1), sequences=1, length=64, attention="varlen")
