"""Exported folders: from_pretrained loads the trained weights, the tokenizer is included, memory use is small."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
)

from benchmarks import export as round_trips
from benchmarks.memory import resident_mb
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.checkpoint import Checkpoints, TrainState
from fourfold.checkpoint.folder import LocalFolder, open_folder
from fourfold.checkpoint.manifest import CorruptCheckpointError
from fourfold.cli.main import main
from fourfold.config import run_file
from fourfold.data.manifest import DatasetManifest
from fourfold.data.prepare import Settings, prepare
from fourfold.data.tokenizer import load_tokenizer
from fourfold.export import export
from fourfold.export import tokenizer as tokenizers
from fourfold.export.folder import _generation, for_transformers_4
from fourfold.export.model_card import _use
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.evaluate import Evaluation
from fourfold.train.observe.metrics import JsonLines
from tests.checkpoints import advance, start
from tests.prepared import as_jsonl, corpus

# -- out and in ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        pytest.param("qwen3", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", marks=pytest.mark.nightly),
    ],
)  # packed and separate projections, both tied; experts
def test_export_and_from_pretrained_are_bit_exact(pool: RankPool, tmp_path: Path, family: str) -> None:
    verdict = round_trips.round_trip(pool, family, tmp_path)
    assert verdict.holds(), verdict
    assert verdict.files > 1


@pytest.mark.parametrize("fault", round_trips.FAULTS)
def test_a_fault_during_export_is_detected(pool: RankPool, tmp_path: Path, fault: str) -> None:
    verdict = round_trips.round_trip(pool, "gpt2", tmp_path, fault)
    assert not verdict.holds()
    assert bool(verdict.exported) == bool(verdict.imported) == (fault == "weight")
    assert (verdict.logits_error > round_trips.LOGITS_BAR) == (fault == "config")


# -- the folder ----------------------------------------------------------------------------------------------------------


def save_gpt2(folder: str) -> None:
    """Checkpoints of steps 1 and 2, both with weights that differ from the initial ones."""
    training = start((1, 2, 1, 2), "gpt2", dtype="bfloat16")
    with Checkpoints(folder) as checkpoints:
        for _ in range(2):
            advance(training)
            checkpoints.save(training)


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    pool.run(save_gpt2, 4, str(folder))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_the_command_exports_a_step_or_the_newest(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "newest")]) == 0
    assert main(["export", f"{run}/step-2/", str(tmp_path / "named"), "--max-shard-size", "20KB"]) == 0
    assert main(["export", str(run), str(tmp_path / "first"), "--step", "1"]) == 0
    newest, named, first = (tensors(tmp_path / name) for name in ("newest", "named", "first"))
    assert len(list((tmp_path / "newest").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "named").glob("*.safetensors"))) > 2
    assert set(newest) == set(named) == set(first)
    assert all(torch.equal(newest[name], named[name]) for name in newest)
    assert not any(torch.equal(newest[name], first[name]) for name in newest)
    index = json.loads((tmp_path / "named" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in named.values())
    assert max(file.stat().st_size for file in (tmp_path / "named").glob("*.safetensors")) < 25_000

    config = json.loads((tmp_path / "newest" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "named")
    assert isinstance(loaded, GPT2LMHeadModel)
    # The run's configuration said bfloat16, the masters are fp32: from_pretrained must not round them.
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, newest[name]), name


def test_weights_are_cast_on_request_in_blocks_of_any_size(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run, tmp_path / "wide")
    monkeypatch.setattr("fourfold.checkpoint.storage.READ_BYTES", 1000)
    assert main(["export", str(run), str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    wide, half = tensors(tmp_path / "wide"), tensors(tmp_path / "half")
    assert {t.dtype for t in wide.values()} == {torch.float32}
    for name, tensor in wide.items():
        assert half[name].dtype == torch.bfloat16
        assert torch.equal(half[name], tensor.bfloat16()), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_nothing_is_overwritten_and_nothing_is_left_incomplete(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for taken in ("out", "other.tmp"):
        (tmp_path / taken).mkdir()
        assert main(["export", str(run), str(tmp_path / taken.removesuffix(".tmp"))]) == 2
        assert not list((tmp_path / taken).iterdir())

    write = LocalFolder.write

    def fails_late(folder: LocalFolder, name: str, parts: Any) -> Any:
        if name == "config.json":
            raise OSError("the disk is full")
        return write(folder, name, parts)

    monkeypatch.setattr(LocalFolder, "write", fails_late)
    with pytest.raises(OSError, match="full"):
        export(run, tmp_path / "late")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other.tmp"}


@pytest.mark.parametrize("where", ["", ".", "..", "/", "memory://"])
def test_an_invalid_folder_name_is_rejected(run: Path, where: str) -> None:
    with pytest.raises(ValueError, match="does not name a folder"):
        export(run, where)


def test_a_damaged_checkpoint_is_never_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    for file in (f for f in run.rglob("*") if f.is_file()):
        target = copy / file.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    file = copy / "step-2" / "rank-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["export", str(copy), str(tmp_path / "out")]) == 0
    assert "rank-1.safetensors" in capsys.readouterr().out
    export(run, tmp_path / "first", step=1)
    found, expected = tensors(tmp_path / "out"), tensors(tmp_path / "first")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for where, step in ((copy, 2), (copy / "step-2", None)):
        with pytest.raises(CorruptCheckpointError, match="rank-1"):
            export(where, tmp_path / "none", step=step)
    assert not (tmp_path / "none").exists()
    for where, step in ((copy, 7), (copy / "step-1", 2), (tmp_path / "nowhere", None)):
        with pytest.raises(ValueError, match=r"step|no checkpoint"):
            export(where, tmp_path / "none", step=step)


def test_export_to_an_object_store(run: Path, tmp_path: Path) -> None:
    exported = export(run, "memory://models/gpt2")
    export(run, tmp_path / "out")
    store = open_folder("memory://models/gpt2")
    assert exported.files[-1] == "config.json"  # what makes it a model
    assert {name: store.read(name) for name in store.names()} == {
        file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()
    }
    with pytest.raises(FileExistsError, match="memory://models/gpt2"):
        export(run, "memory://models/gpt2")


# -- tokenizer and card --------------------------------------------------------------------------------------------------


def train(run: dict[str, Any]) -> None:
    settings = run_file.from_dict(run)
    callbacks = [Evaluation(2, every_steps=2), JsonLines(settings.logging.folder)]
    trainer = Trainer(settings, Grid.create((1, 1, 1, 1)), callbacks)
    with Checkpoints(settings.checkpoints.folder) as checkpoints:
        trainer.train(checkpoints)


def test_export_includes_the_tokenizer_and_a_model_card(pool: RankPool, tmp_path: Path) -> None:
    text = as_jsonl(corpus(8), tmp_path / "text.jsonl")
    data = prepare(
        tmp_path / "data|set", [str(text)], Settings(train_vocab_size=300, validation=0.4), processes=1
    )
    LlamaConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=304
    ).save_pretrained(tmp_path / "model")
    steps, tokens, length = 3, 64, 32
    run = {
        "model": {"config": str(tmp_path / "model")},
        "data": {"sources": [{"path": str(tmp_path / "data|set")}], "sequence_length": length},
        "batch": {"tokens": tokens},
        "schedule": {"steps": steps, "warmup_steps": 1},
        "engine": {"precision": "fp32"},
        "checkpoints": {"folder": str(tmp_path / "run")},
        "logging": {"folder": str(tmp_path / "logs")},
    }
    pool.run(train, 1, run)
    out = tmp_path / "out"
    exported = export(tmp_path / "run", out)
    assert not exported.notes

    tokenizer, model = AutoTokenizer.from_pretrained(out), LlamaForCausalLM.from_pretrained(out)
    assert tokenizer.decode(tokenizer("def f(x):").input_ids) == "def f(x):"
    # LlamaConfig says 2; the text was cut with another token.
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == data.tokenizer.eos_id != 2
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.use_cache

    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n")
    logged = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    parameters = sum(p.numel() for p in model.parameters())
    fingerprint = DatasetManifest.load(tmp_path / "data|set").fingerprint
    for fact in (
        "LlamaForCausalLM, step 3",
        f"| parameters | {parameters:,} |",
        f"| tokens seen | {steps * tokens} (6 samples of 32) |",
        "| step | 3 of 3 |",
        "data=1, z=1, y=1, x=1",
        "name adamw, lr 0.0003",
        "kind cosine, warmup steps 1",
        "| precision | fp32, fp32 master weights |",
        f"{logged[-1]['loss']:.4f} at step 3",
        f"{logged[-1]['validation_loss']:.4f} at step 3",
        rf"data\|set | 1.0 | {fingerprint} |",
        f"fingerprint {data.tokenizer.fingerprint}",
        f"| torch | {torch.__version__} |",
    ):
        assert fact in card, fact
    assert math.isfinite(logged[-1]["loss"])

    # A log that goes on says nothing of what came after; a card without a log has no loss.
    with (tmp_path / "logs" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 0.123456}\n{"step": 5, "lo')
    export(tmp_path / "run", tmp_path / "later")
    assert (tmp_path / "later" / "README.md").read_text() == card
    (tmp_path / "logs" / "metrics.jsonl").unlink()
    export(tmp_path / "run", tmp_path / "bare")
    assert "## Loss" not in (tmp_path / "bare" / "README.md").read_text()


def test_a_tokenizer_that_transformers_would_replace_is_noted(tmp_path: Path) -> None:
    """For Qwen2 it takes a class of its own, which splits text in another way, whatever the folder says."""
    text = as_jsonl(corpus(8), tmp_path / "text.jsonl")
    prepare(tmp_path / "data", [str(text)], Settings(train_vocab_size=300), processes=1)
    tokenizer = load_tokenizer(str(tmp_path / "data" / "tokenizer"))
    assert tokenizers.why_not_auto(tokenizer, LlamaConfig().to_dict()) is None
    why = tokenizers.why_not_auto(tokenizer, Qwen2Config().to_dict())
    assert why is not None
    assert "as Qwen2Tokenizer, which gives other token ids" in why
    card = _use("PreTrainedTokenizerFast")
    assert "import AutoModelForCausalLM, PreTrainedTokenizerFast" in card
    assert 'PreTrainedTokenizerFast.from_pretrained("path/to/this/folder")' in card


def test_pretrained_generation_settings_are_kept_or_missed_with_a_note(tmp_path: Path) -> None:
    """Where the pretrained folder is gone, the ids of the model's config stay, and not those of the tokenizer."""
    from fourfold.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["to be or not to be"], 260)
    folder = tmp_path / "pretrained"
    values = {"config": {"model": {"pretrained": str(folder)}}, "model": {"eos_token_id": [7, 8]}}
    notes: list[str] = []
    assert _generation(values, tokenizer, notes)["eos_token_id"] == [7, 8]
    assert "copy its generation_config.json" in notes.pop()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert _generation(values, tokenizer, notes) == {"temperature": 0.6}
    assert not notes


def test_a_missing_or_mismatched_tokenizer_is_reported(run: Path, tmp_path: Path) -> None:
    exported = export(run, tmp_path / "without")
    assert any("--tokenizer" in note for note in exported.notes)
    assert not list((tmp_path / "without").glob("tokenizer*"))

    from fourfold.data.tokenizer import train_tokenizer

    train_tokenizer(["to be or not to be"], 260).save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match="has 260 tokens, the model's vocabulary has 131"):
        export(run, tmp_path / "out", tokenizer=tmp_path / "words")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        export(run, tmp_path / "out", tokenizer=tmp_path / "empty")
    assert not (tmp_path / "out").exists()


# -- memory --------------------------------------------------------------------------------------------------------------


def save_large(folder: str) -> None:
    """One tensor is most of the model."""
    training = start((1, 1, 1, 1), "llama", vocab_size=700_000, hidden_size=64, tie_word_embeddings=True)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(TrainState(training.model, training.optimizer, training.report))


def rise_mb(run: Path, out: Path) -> float:
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's way to reset VmHWM
    before_mb = resident_mb("VmRSS")
    export(run, out)
    return resident_mb("VmHWM") - before_mb


def test_memory_stays_far_below_the_model(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(save_large, 1, str(tmp_path / "run"))
    rise = rise_mb(tmp_path / "run", tmp_path / "out")
    size_mb = (tmp_path / "out" / "model.safetensors").stat().st_size / 1e6
    assert rise < 90 < 0.51 * size_mb  # three blocks of 16 MiB, and what malloc keeps of them
    # The measure sees a tensor that is held whole.
    monkeypatch.setattr("fourfold.checkpoint.storage.READ_BYTES", 2**40)
    assert rise_mb(tmp_path / "run", tmp_path / "whole") > size_mb


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_a_config_has_the_positions_of_transformers_4_and_means_the_same(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    before = LlamaConfig(rope_parameters=rope)
    written = for_transformers_4(before.to_dict())
    assert written["rope_theta"] == 5e5
    assert ("rope_scaling" in written) == (rope["rope_type"] != "default")
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == before.rope_parameters == rope
