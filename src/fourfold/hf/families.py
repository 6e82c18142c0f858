"""What model families need beyond their own tensor-parallel plan.

Patterns are module names relative to the model; `*` stands for one part of a name, at its beginning for any number. The roles are those of Hugging Face's
plans and a few more, explained in `role_words.py`. Families with a complete plan of their own need no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """What one `model_type` needs besides its plan."""

    roles: Mapping[str, str] = field(default_factory=dict)
    # Fused projections whose rows are ordered by segment: module pattern -> "thirds" (q, k and v of one size), "halves" (gate and
    # up), "q,k,v" (sizes by the head counts), or the attributes of its parent that are the sizes. Rows that are ordered by head need no
    # entry: a rank's rows are its heads.
    packed: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    # Attributes of attention modules that count inner features, and so shrink with the heads.
    inner_attributes: tuple[str, ...] = ()
    # Attention reads head counts from its config instead of its own attributes.
    heads_from_config: bool = False
    # Modules whose output is unsharded, but whose consumer reads hidden features sharded over y: shard it after them.
    cut_outputs: tuple[str, ...] = ()
    # Arguments of attention that carry one slice for each head: name -> the dim, "heads", "batch*heads" or "batch,heads".
    head_arguments: Mapping[str, str] = field(default_factory=dict)
    # Buffers of attention that carry one slice for each head: name -> the dim of the heads.
    head_buffers: Mapping[str, int] = field(default_factory=dict)
    # Arguments of blocks with features that colwise linears of the block give, complete on each rank: x has a part of them.
    block_arguments: tuple[str, ...] = ()
    # Modules whose code calls one kernel in training that multiplies with the weight of their output projection as well: they take the
    # other path of their code, and their projection is a module.
    without_training_path: tuple[str, ...] = ()
    # Why the family cannot be sharded exactly, if it cannot.
    unsupported: str | None = None


def _roles(prefix: str, **named: str) -> dict[str, str]:
    """The names of modules under ``prefix``, separated by spaces and listed by role -> their roles."""
    return {f"{prefix}.{name}": role for role, names in named.items() for name in names.split()}


def _separate_qkv(prefix: str, attention: str, out: str, mlp_in: str, mlp_out: str) -> dict[str, str]:
    """The roles of blocks with q_proj, k_proj and v_proj."""
    colwise = f"{attention}.q_proj {attention}.k_proj {attention}.v_proj {mlp_in}"
    return _roles(prefix, colwise=colwise, rowwise=f"{attention}.{out} {mlp_out}")


_LLAMA_LIKE = _separate_qkv("*.layers.*", "self_attn", "o_proj", "mlp.gate_proj mlp.up_proj", "mlp.down_proj")
_OUT_OF_ATTENTION = {"*.layers.*.self_attn.o_proj": "rowwise"}


def _shared_experts(name: str) -> dict[str, str]:
    """The MLP that every token passes through, beside the experts that are chosen."""
    return _roles(f"*.layers.*.mlp.{name}", colwise="gate_proj up_proj", rowwise="down_proj")


def _fairseq_like(prefix: str) -> dict[str, str]:
    return _separate_qkv(prefix, "self_attn", "out_proj", "fc1", "fc2")


def _neox_like(prefix: str, attention: str, **others: str) -> dict[str, str]:
    colwise, rowwise = (
        f"{attention}.query_key_value mlp.dense_h_to_4h",
        f"{attention}.dense mlp.dense_4h_to_h",
    )
    return _roles(prefix, colwise=colwise, rowwise=rowwise, **others)


_GPT2_LIKE = _roles("transformer.h.*", colwise="attn.c_attn mlp.c_fc", rowwise="attn.c_proj mlp.c_proj")

_STATES = "n_groups*ssm_state_size"  # of Mamba 2

# Gated DeltaNet: value heads belong to key heads, which x shards.
_KEYS_AND_VALUES = ("key_dim", "key_dim", "value_dim")


def _delta_net(colwise: str, norm: str, out: str, **packed: tuple[str, ...]) -> Family:
    others = {"heads": "A_log dt_bias", "channels": "conv1d", "replicated_with_grad_allreduce": norm}
    return Family(
        _roles("*.layers.*.linear_attn", colwise=colwise, rowwise=out, **others),
        packed={f"*.linear_attn.{name}": sizes for name, sizes in packed.items()}
        | {"*.linear_attn.conv1d": _KEYS_AND_VALUES},
        inner_attributes=("num_v_heads", "key_dim", "value_dim", "conv_dim"),
    )


# The indexer of sparse attention chooses tokens, without gradients, alike on all ranks.
_INDEXER = _roles("*.layers.*.self_attn.indexer", latent="wk weights_proj", replicated="wq_b k_norm")

# Kimi delta attention, in layers beside those of latent attention.
_KIMI_DELTA = Family(
    _roles(
        "*.layers.*.self_attn",
        colwise="q_proj k_proj v_proj b_proj g_proj forget_gate.f_proj",
        rowwise="o_proj",
        latent="g_a_proj forget_gate.f_a_proj",
        colwise_from_latent="g_b_proj forget_gate.f_b_proj",
        heads="forget_gate.dt_bias forget_gate.A_log",
        channels="conv1d",
        replicated_with_grad_allreduce="o_norm",
    ),
    packed={"*.self_attn.conv1d": ("qkv_dim", "qkv_dim", "qkv_dim")},
    inner_attributes=("qkv_dim", "conv_dim"),
)


_QWEN3_5 = _delta_net(
    "in_proj_qkv in_proj_z in_proj_b in_proj_a", "norm", "out_proj", in_proj_qkv=_KEYS_AND_VALUES
)

_PHI3_LIKE = Family(
    packed={"*.layers.*.self_attn.qkv_proj": "q,k,v", "*.layers.*.mlp.gate_up_proj": "halves"},
    heads_from_config=True,
)

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _GPT2_LIKE,
        packed={"transformer.h.*.attn.c_attn": "thirds"},
        inner_attributes=("split_size", "embed_dim"),
    ),
    "opt": Family(_fairseq_like("model.decoder.layers.*"), inner_attributes=("embed_dim",)),
    "xglm": Family(
        _fairseq_like("model.layers.*"),
        inner_attributes=("embed_dim",),
        cut_outputs=("model.embed_positions",),  # sines and cosines, made for all features
    ),
    "biogpt": Family(_fairseq_like("biogpt.layers.*"), inner_attributes=("embed_dim",)),
    "bloom": Family(_neox_like("transformer.h.*", "self_attention"), head_arguments={"alibi": "batch*heads"}),
    # With ALiBi, its slopes are part of the attention mask.
    "falcon": Family(
        _neox_like("transformer.h.*", "self_attention"),
        head_arguments={"alibi": "batch*heads", "attention_mask": "batch,heads"},
    ),
    "gpt_neo": Family(
        _separate_qkv("transformer.h.*", "attn.attention", "out_proj", "mlp.c_fc", "mlp.c_proj"),
        inner_attributes=("embed_dim",),
    ),
    "gptj": Family(
        _separate_qkv("transformer.h.*", "attn", "out_proj", "mlp.fc_in", "mlp.fc_out"),
        inner_attributes=("embed_dim",),
    ),
    "mpt": Family(
        _roles(
            "transformer.blocks.*",
            colwise="attn.Wqkv ffn.up_proj",
            rowwise="attn.out_proj ffn.down_proj",
        ),
        packed={"transformer.blocks.*.attn.Wqkv": "thirds"},
        inner_attributes=("hidden_size",),
        head_arguments={"position_bias": "heads"},
    ),
    "gpt_bigcode": Family(_GPT2_LIKE, inner_attributes=("embed_dim", "kv_dim")),
    "openai-gpt": Family(
        _GPT2_LIKE,
        packed={"transformer.h.*.attn.c_attn": "thirds"},
        inner_attributes=("split_size", "n_state"),
    ),
    "persimmon": Family(_neox_like("model.layers.*", "self_attn")),
    "stablelm": Family(_LLAMA_LIKE),
    "hunyuan_v1_dense": Family(_LLAMA_LIKE),
    "bitnet": Family(
        {
            **_LLAMA_LIKE,
            "*.layers.*.self_attn.attn_sub_norm": "norm_x",
            "*.layers.*.mlp.ffn_sub_norm": "norm_x",
        }
    ),
    "diffllama": Family(
        unsupported="its attention takes the difference of head i and head i + heads/2, which sharding over x separates"
    ),
    "codegen": Family(
        unsupported="its fused projection is ordered for four model-parallel ranks (mp_num = 4 in CodeGenAttention.forward)"
    ),
    "ctrl": Family(
        unsupported="it adds a table of positions for all features in CTRLModel.forward, where there is no module to shard"
    ),
    "gpt_neox_japanese": Family(
        _neox_like("gpt_neox_japanese.layers.*", "attention", features="attention.dense_bias"),
    ),
    "apertus": Family(
        {
            "model.layers.*.mlp.act_fn.alpha_p": "replicated_with_grad_allreduce",
            "model.layers.*.mlp.act_fn.alpha_n": "replicated_with_grad_allreduce",
        }
    ),
    "doge": Family(
        unsupported="its attention's dt_proj mixes all key/value heads into one value for each: a linear from x to x, for which there is no role"
    ),
    "muse_glimmer_assistant": Family(
        unsupported="its encoder.fc, in the plan as rowwise_split_input, reads features that no earlier layer has sharded"
    ),
    "hrm_text": Family({"model.z_L_init": "features"}),
    "esmc": Family(
        {
            "lm_head.dense": "latent",
            "lm_head.layer_norm": "replicated",
            "lm_head.decoder": "colwise_from_latent",
        }
    ),
    "ultrabert": Family({"head.linear1": "colwise", "head.linear2": "rowwise", "head.decoder": "colwise"}),
    "modernbert-decoder": Family(
        {
            **_separate_qkv("model.layers.*", "attn", "Wo", "mlp.Wi", "mlp.Wo"),
            "lm_head.dense": "latent",
            "lm_head.norm": "replicated",
        },
        packed={"model.layers.*.mlp.Wi": "halves"},
        cut_outputs=("lm_head.norm",),
    ),
    "t5gemma": Family(
        _roles("model.decoder.layers.*.cross_attn", colwise="q_proj k_proj v_proj", rowwise="o_proj"),
    ),
    "emu3_text_model": Family(_LLAMA_LIKE),
    "phi3": _PHI3_LIKE,
    "phi4_multimodal": _PHI3_LIKE,
    # Their plans name the MLP alone; attention is DeepSeek's latent attention, whose names `role_words.py` knows.
    **dict.fromkeys(("youtu", "deepseek_v3", "axk1", "mistral4"), Family(_OUT_OF_ATTENTION)),
    # Linear attention, whose projections plans replicate.
    "qwen3_next": _delta_net("in_proj_qkvz in_proj_ba", "norm", "out_proj"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5),
    "olmo_hybrid": _delta_net("q_proj k_proj v_proj a_proj b_proj g_proj", "o_norm", "o_proj"),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _KIMI_DELTA),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "dots3_note_text"), Family({**_OUT_OF_ATTENTION, **_INDEXER})
    ),
    "lfm2_moe": Family(
        {
            **_roles("*.layers.*.conv", colwise="in_proj", rowwise="out_proj", channels="conv"),
            **_roles("*.layers.*.self_attn", colwise="q_proj k_proj v_proj", rowwise="out_proj"),
            **_roles("*.layers.*.feed_forward", colwise="w1 w3", rowwise="w2"),
        },
        packed={"*.layers.*.conv.in_proj": "thirds"},
    ),
    "nemotron_h": Family(
        _roles(
            "*.layers.*.mixer",
            colwise="in_proj q_proj k_proj v_proj up_proj shared_experts.up_proj",
            rowwise="out_proj o_proj down_proj shared_experts.down_proj",
            heads="A_log D dt_bias norm",
            channels="conv1d",
        ),
        packed={
            "*.mixer.in_proj": ("intermediate_size", "intermediate_size", _STATES, _STATES, "num_heads"),
            "*.mixer.conv1d": ("intermediate_size", _STATES, _STATES),
        },
        inner_attributes=("intermediate_size", "conv_dim"),
        without_training_path=("*.mixer",),
    ),
    "jamba": Family(
        {
            **_LLAMA_LIKE,
            **_roles("*.layers.*.feed_forward", colwise="gate_proj up_proj", rowwise="down_proj"),
            **_roles(
                "*.layers.*.mamba",
                colwise="in_proj",
                rowwise="out_proj",
                channels="conv1d",
                heads="A_log D dt_proj",
                rowwise_replicated="x_proj",
                replicated_with_grad_allreduce="dt_layernorm b_layernorm c_layernorm",
            ),
        },
        packed={"*.mamba.in_proj": "halves"},
        inner_attributes=("intermediate_size",),
    ),
    "gemma4_text": Family(
        {
            **_roles("*.layers.*", colwise="per_layer_input_gate", rowwise="per_layer_projection"),
            "*.embed_tokens_per_layer": "replicated",
            "*.per_layer_model_projection": "latent",
            "*.per_layer_projection_norm": "replicated",
        },
        block_arguments=("per_layer_input",),
    ),
    "minimax": Family(
        _roles("*.layers.*.self_attn", colwise="qkv_proj output_gate", rowwise="out_proj", norm_x="norm"),
        head_buffers={"slope_rate": 0, "query_decay": 0, "key_decay": 0, "diagonal_decay": 1},
    ),
    # Mixture of experts, of which plans name the experts: what else is in a layer.
    "afmoe": Family(
        {
            **_LLAMA_LIKE,
            **_shared_experts("shared_experts"),
            "*.layers.*.self_attn.gate_proj": "colwise",
            "*.layers.*.mlp.expert_bias": "replicated",
        }
    ),
    **dict.fromkeys(("phimoe", "granitemoe"), Family(_LLAMA_LIKE)),
    **dict.fromkeys(
        ("granitemoeshared", "granitemoe_swa"),
        Family(
            {
                **_LLAMA_LIKE,
                "*.layers.*.self_attn.sinks": "heads",
                "*.layers.*.shared_mlp.input_linear": "packed_colwise",
                "*.layers.*.shared_mlp.output_linear": "rowwise",
            }
        ),
    ),
    **dict.fromkeys(("gpt_oss", "flint"), Family({**_LLAMA_LIKE, "*.layers.*.self_attn.sinks": "heads"})),
    "hunyuan_v1_moe": Family({**_LLAMA_LIKE, **_shared_experts("shared_mlp")}),
    **dict.fromkeys(("exaone_moe", "glm4_moe_lite", "solar_open"), Family(_shared_experts("shared_experts"))),
    "qwen2_moe": Family(_shared_experts("shared_expert")),
    **dict.fromkeys(("step3p7", "step3p5"), Family({**_LLAMA_LIKE, **_shared_experts("shared_experts")})),
    **dict.fromkeys(
        ("minimax_m3_vl", "minimax_m3_vl_text"),
        Family(
            {
                **_LLAMA_LIKE,
                "*.layers.*.mlp.gate_up_proj": "packed_colwise",
                "*.layers.*.mlp.shared_experts.gate_up_proj": "packed_colwise",
                "*.layers.*.mlp.shared_experts.down_proj": "rowwise",
            }
        ),
    ),
}

# Roles of latent attention (DeepSeek and models like it), by the last part of a module's name.
LATENT_ATTENTION = {
    "q_a_proj": "latent",
    "q_b_proj": "colwise_from_latent",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
    "kv_b_proj": "colwise_from_latent",
    "q_a_layernorm": "replicated",
    "kv_a_layernorm": "replicated",
}
