"""The smallest configuration of a model family that still has every part of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

VOCAB = 131  # a prime: no grid divides it
# Near 1/sqrt(hidden size): attention is far from uniform, so a wrong head shows in the loss.
INITIALIZER_RANGE = 0.1
BASIC_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIRST_ORDINARY_TOKEN = 24  # ids below are for padding, begin, end, image and the like

# Tiny value -> the config fields that take it, in every config whose own default is a number above zero.
_NAMES_OF_SIZE = {
    64: """hidden_size n_embd d_model embed_dim dim dim_model out_hidden_size output_dim embedding_dim
        projector_hidden_size prediction_head_size moe_hidden_size
        max_position_embeddings n_positions n_ctx max_seq_len model_max_length""",
    128: """intermediate_size n_inner ffn_dim ffn_hidden_size dff dim_ff encoder_ffn_dim decoder_ffn_dim
        dense_intermediate_size intermediate_size_mlp shared_intermediate_size""",
    32: """moe_intermediate_size expert_ffn_hidden_size share_expert_dim shared_expert_intermediate_size
        moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank o_lora_rank laurel_rank embedding_rank""",
    24: "qk_head_dim",  # qk_nope_head_dim + qk_rope_head_dim
    16: """head_dim swa_head_dim dim_head kv_channels v_head_dim qk_nope_head_dim index_head_dim linear_head_dim
        linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_state ssm_state_size
        hidden_size_per_layer_input""",
    8: """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        decoder_attention_heads swa_num_attention_heads num_sliding_attention_heads linear_num_heads
        linear_num_value_heads index_n_heads mamba_num_heads mamba_n_heads qk_rope_head_dim rotary_dim
        index_topk keep_window_size hc_lowrank gated_norm_rank
        sliding_window sliding_window_size window_size attention_chunk_size""",
    4: """num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads
        linear_num_key_heads num_experts num_local_experts n_routed_experts moe_num_experts""",
    2: """num_hidden_layers n_layer n_layers num_layers depth num_layers_per_stack encoder_layers decoder_layers
        num_blocks num_experts_per_tok num_experts_per_token moe_k moe_topk""",
    1: """n_group num_expert_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts
        num_nextn_predict_layers first_k_dense_replace num_dense_layers""",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
EXPERTS, CHOSEN = 4, 2
SIZES = {name: size for size, names in _NAMES_OF_SIZE.items() for name in names.split()}

# Sizes to give although the config leaves them to be derived.
SIZES_THOUGH_UNSET = {"num_key_value_heads", "num_kv_heads", "head_dim", "n_inner", "num_experts_per_tok"}

# Multi-head latent attention has one key per query head, with rotary positions on a slice of it.
LATENT_ATTENTION = {"num_key_value_heads": 8, "head_dim": 8}


def _mrope(*sections: int) -> dict[str, Any]:
    """Rotary positions of (time, height, width): the sections add up to half of a head."""
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}


# Full attention layers have wider heads than sliding ones.
_WIDE_FULL_ATTENTION = {"global_head_dim": 32, "num_global_key_value_heads": 4}

# What a family needs besides, by folder (`folder:variant` for a variant). A nested dictionary is for a sub-config.
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere:qk_norm": {"use_qk_norm": True},
    "cohere_compass": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "cosmos3_edge": {"text_config": {"rope_parameters": _mrope(2, 3, 3)}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
    },
    "diffusion_gemma": {
        "text_config": _WIDE_FULL_ATTENTION
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "embedding_gemma2": _WIDE_FULL_ATTENTION,
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": _mrope(1, 1, 2), "moe_intermediate_size": [32, 32]}
    },
    "esmc": {"num_key_value_heads": 8, "head_dim": 8},
    "falcon": {"num_kv_heads": 8, "multi_query": False},
    "falcon:alibi": {"num_kv_heads": 8, "multi_query": False, "alibi": True},
    "falcon:new_decoder": {"num_kv_heads": 4, "new_decoder_architecture": True},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4": _WIDE_FULL_ATTENTION,
    "gemma4:moe": _WIDE_FULL_ATTENTION
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified": _WIDE_FULL_ATTENTION,
    "glm4v": {"text_config": {"rope_parameters": _mrope(2, 1, 1)}},
    "glm4v_moe": {"text_config": {"rope_parameters": _mrope(2, 1, 1) | {"partial_rotary_factor": 1.0}}},
    "glm5_next": {"text_config": {"num_key_value_heads": 8, "index_kpool": 4}},
    "glm_image": {"text_config": {"rope_parameters": _mrope(2, 1, 1), "vision_vocab_size": VOCAB}},
    "glm_ocr": {"text_config": {"rope_parameters": _mrope(2, 1, 1)}},
    "gpt_bigcode": {"multi_query": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "1/2", "spatial_target_layers": [0]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "helium": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "muse_glimmer_assistant": {"layer_types": ["full_attention"] * 2},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": (8, 16, 32, 64)}},
    "paddleocr_vl": {"text_config": {"rope_parameters": _mrope(2, 3, 3)}},
    "phi:qk_layernorm": {"qk_layernorm": True},
    "qwen2_5_omni": {"text_config": {"rope_parameters": _mrope(2, 1, 1)}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _mrope(2, 1, 1)}},
    "qwen2_vl": {"text_config": {"rope_parameters": _mrope(2, 1, 1)}},
    "qwen4_exp": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "stablelm:qk_layernorm": {"qk_layernorm": True},
    "step3p7": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": 8,
            "num_hidden_layers": 2,
        }
    },
}

# Decoder-only families without a `base_model_tp_plan`, and variants: folder -> config class.
EXTRA_FAMILIES: dict[str, str] = {
    "biogpt": "BioGptConfig",
    "bitnet": "BitNetConfig",
    "bloom": "BloomConfig",
    "codegen": "CodeGenConfig",
    "cohere:qk_norm": "CohereConfig",
    "cpmant": "CpmAntConfig",
    "ctrl": "CTRLConfig",
    "diffllama": "DiffLlamaConfig",
    "emu3": "Emu3TextConfig",
    "falcon": "FalconConfig",
    "falcon:alibi": "FalconConfig",
    "falcon:new_decoder": "FalconConfig",
    "gemma4:moe": "Gemma4TextConfig",
    "gpt2": "GPT2Config",
    "gpt_bigcode": "GPTBigCodeConfig",
    "gpt_neo": "GPTNeoConfig",
    "gpt_neox_japanese": "GPTNeoXJapaneseConfig",
    "gpt_oss": "GptOssConfig",
    "gptj": "GPTJConfig",
    "hunyuan_v1_dense": "HunYuanDenseV1Config",
    "jetmoe": "JetMoeConfig",
    "modernbert_decoder": "ModernBertDecoderConfig",
    "mpt": "MptConfig",
    "openai": "OpenAIGPTConfig",
    "opt": "OPTConfig",
    "persimmon": "PersimmonConfig",
    "phi:qk_layernorm": "PhiConfig",
    "stablelm": "StableLmConfig",
    "stablelm:qk_layernorm": "StableLmConfig",
    "xglm": "XGLMConfig",
}


def tiny_config(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    """`config_class` with the sizes of `SIZES`, no dropout, small token ids; then `overrides`, sub-configs likewise."""
    values = _tiny_fields(config_class)
    for name, sub_class in _sub_config_classes(config_class).items():
        values[name] = tiny_config(sub_class, overrides.get(name, {}))
    values |= {k: v for k, v in overrides.items() if not isinstance(values.get(k), PreTrainedConfig)}
    return config_class(**values)


def set_experts(config: PreTrainedConfig, experts: int, chosen: int) -> None:
    """Other numbers than `EXPERTS`, of which a token chooses `CHOSEN`, also in sub-configs."""
    subs = [getattr(config, name, None) for name in config.sub_configs]
    for each in (config, *(sub for sub in subs if isinstance(sub, PreTrainedConfig))):
        for names, before, after in ((EXPERT_NAMES, EXPERTS, experts), (CHOSEN_NAMES, CHOSEN, chosen)):
            for name in names:
                if getattr(each, name, None) == before:
                    setattr(each, name, after)


def _tiny_fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    special_id = len(BASIC_TOKENS)
    for field in dataclasses.fields(config_class):
        name, default = field.name, field.default
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if name in SIZES and (default > 0 if is_number else default is None and name in SIZES_THOUGH_UNSET):
            values[name] = SIZES[name]
        elif name == "initializer_range" and is_number:
            values[name] = INITIALIZER_RANGE
        elif is_number and any(word in name for word in ("dropout", "pdrop", "jitter", "layerdrop")):
            values[name] = type(default)(0)
        elif name in BASIC_TOKENS and default is not None:
            values[name] = BASIC_TOKENS[name]
        elif is_number and name.endswith(("_token_id", "_token_index")):
            values[name], special_id = special_id, special_id + 1
    if "qk_rope_head_dim" in values:
        values |= {name: value for name, value in LATENT_ATTENTION.items() if name in values}
    return values | _every_layer_kind(config_class)


def _every_layer_kind(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """One layer of each kind (sliding, linear, full attention; dense, sparse) where the default has several."""
    names = {"layer_types", "mlp_layer_types"} & {field.name for field in dataclasses.fields(config_class)}
    if not names:
        return {}
    default = config_class()
    kinds = {name: list(dict.fromkeys(getattr(default, name) or ())) for name in sorted(names)}
    kinds = {name: sorted(of, key="full_attention".__eq__) for name, of in kinds.items() if len(of) > 1}
    if not kinds:
        return {}
    layers = max(len(of) for of in kinds.values())
    return {"num_hidden_layers": layers} | {name: (of * layers)[:layers] for name, of in kinds.items()}


def _sub_config_classes(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    if not config_class.sub_configs:
        return {}
    default = config_class()
    return {
        name: type(sub)
        for name in config_class.sub_configs
        if isinstance(sub := getattr(default, name, None), PreTrainedConfig)
    }
