"""Workloads against models that transformers builds, and against formulas of others."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from benchmarks.published_rows import gpt, in_scope
from fourfold.planner.inputs.workload import Workload, from_config

SIZES = {"hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 3, "vocab_size": 1001}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=2),
        LlamaConfig(
            **SIZES, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True, head_dim=16
        ),
        Qwen2Config(**SIZES, num_attention_heads=6, num_key_value_heads=3),
        GPT2Config(n_embd=96, n_layer=2, n_head=4, n_positions=64, vocab_size=501),
        GPTBigCodeConfig(n_embd=96, n_layer=2, n_head=4, n_positions=64, vocab_size=501),
    ],
    ids=["llama", "llama tied, own head_dim", "qwen2", "gpt2", "gpt_bigcode, one key/value head"],
)
def test_parameters_are_those_of_the_model(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert from_config(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 8),
    ],
)
def test_key_value_heads_in_falcons_words(changes, kv_heads):
    config = FalconConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=501, **changes
    )
    assert from_config(config.to_dict()).kv_heads == kv_heads


def test_a_few_norms_of_heads_are_all_that_is_missing():
    config = Qwen3Config(**SIZES, num_attention_heads=6, num_key_value_heads=3, head_dim=16)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert count - from_config(config.to_dict()).parameters == 3 * 2 * 16


def test_published_parameter_counts():
    # Every row of llm-foundry states its count, and `in_scope` refuses a shape that does not give it.
    assert sum(row.source == "llm-foundry" for row in in_scope()) == 209


@pytest.mark.parametrize(("hidden", "layers", "heads"), [(2304, 24, 24), (12288, 96, 96)])
def test_flops_are_megatrons(hidden, layers, heads):
    batch, s, v = 512, 2048, 51200
    formula = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    workload = gpt("megatron", hidden, layers, heads, v, tied=True)
    assert workload.hardware_flops(batch * s, s, again=workload.layers) == pytest.approx(formula)


def test_recomputation_is_work_of_the_hardware_alone():
    workload = Workload("8b", 4096, 14336, 32, 32, 8, 128, 128256)
    model = workload.model_flops(1e6, 8192)
    assert workload.hardware_flops(1e6, 8192, again=0) == model
    assert model < workload.hardware_flops(1e6, 8192, again=workload.layers) < model * 4 / 3


def test_a_file_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "model_type": "llama", "num_attention_heads": 8}))
    workload = from_config(path)
    assert (workload.hidden, workload.kv_heads, workload.name) == (96, 8, "config")


def test_what_a_config_leaves_out_is_that_of_its_class():
    """As published configs of Gemma 3 do."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    workload = from_config({"model_type": "gemma3", "text_config": text})
    assert (workload.heads, workload.kv_heads, workload.head_dim) == (8, 4, 256)
    assert (workload.hidden, workload.layers, workload.vocabulary) == (2560, 34, 262208)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": 8}, "8 experts"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_a_config_that_cannot_be_planned_is_rejected(change, words):
    with pytest.raises(ValueError, match=words):
        from_config({**SIZES, "model_type": "llama", "num_attention_heads": 8, **change})
