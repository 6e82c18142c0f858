"""What model families need beyond their own tensor-parallel plan.

Patterns are module names relative to the model; `*` stands for one part of a name. The roles are those of Hugging Face's
plans and a few more, explained in `roles.py`. Families with a complete plan of their own need no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """What one `model_type` needs besides its plan."""

    roles: Mapping[str, str] = field(default_factory=dict)
    # Fused projections: module pattern -> segments, in words that `roles.py` turns into widths.
    packed: Mapping[str, str] = field(default_factory=dict)
    # Attributes of attention modules that count inner features, and so shrink with the heads.
    inner_attributes: tuple[str, ...] = ()
    # Attention reads head counts from its config instead of its own attributes.
    heads_from_config: bool = False
    # Modules whose output is unsharded, but whose consumer reads hidden features sharded over y: shard it after them.
    cut_outputs: tuple[str, ...] = ()
    # Arguments of attention that carry one slice for each head: name -> the dim, "heads", "batch*heads" or "batch,heads".
    head_arguments: Mapping[str, str] = field(default_factory=dict)
    # Why the family cannot be sharded exactly, if it cannot.
    unsupported: str | None = None


_LLAMA_LIKE = {
    "*.layers.*.self_attn.q_proj": "colwise",
    "*.layers.*.self_attn.k_proj": "colwise",
    "*.layers.*.self_attn.v_proj": "colwise",
    "*.layers.*.self_attn.o_proj": "rowwise",
    "*.layers.*.mlp.gate_proj": "colwise",
    "*.layers.*.mlp.up_proj": "colwise",
    "*.layers.*.mlp.down_proj": "rowwise",
}
_FAIRSEQ_LIKE = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}


def _under(prefix: str, roles: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": role for name, role in roles.items()}


_NEOX_LIKE = {
    "mlp.dense_h_to_4h": "colwise",
    "mlp.dense_4h_to_h": "rowwise",
}
_BLOOM_LIKE = {
    "self_attention.query_key_value": "colwise",
    "self_attention.dense": "rowwise",
    **_NEOX_LIKE,
}
_GPT2_LIKE = {
    "attn.c_attn": "colwise",
    "attn.c_proj": "rowwise",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _under("transformer.h.*", _GPT2_LIKE),
        packed={"transformer.h.*.attn.c_attn": "thirds"},
        inner_attributes=("split_size", "embed_dim"),
    ),
    "opt": Family(_under("model.decoder.layers.*", _FAIRSEQ_LIKE), inner_attributes=("embed_dim",)),
    "xglm": Family(
        _under("model.layers.*", _FAIRSEQ_LIKE),
        inner_attributes=("embed_dim",),
        cut_outputs=("model.embed_positions",),  # sines and cosines, made for all features
    ),
    "biogpt": Family(_under("biogpt.layers.*", _FAIRSEQ_LIKE), inner_attributes=("embed_dim",)),
    "bloom": Family(_under("transformer.h.*", _BLOOM_LIKE), head_arguments={"alibi": "batch*heads"}),
    # With ALiBi, its slopes are part of the attention mask.
    "falcon": Family(
        _under("transformer.h.*", _BLOOM_LIKE),
        head_arguments={"alibi": "batch*heads", "attention_mask": "batch,heads"},
    ),
    "gpt_neo": Family(
        _under(
            "transformer.h.*",
            {
                "attn.attention.q_proj": "colwise",
                "attn.attention.k_proj": "colwise",
                "attn.attention.v_proj": "colwise",
                "attn.attention.out_proj": "rowwise",
                "mlp.c_fc": "colwise",
                "mlp.c_proj": "rowwise",
            },
        ),
        inner_attributes=("embed_dim",),
    ),
    "gptj": Family(
        _under(
            "transformer.h.*",
            {
                "attn.q_proj": "colwise",
                "attn.k_proj": "colwise",
                "attn.v_proj": "colwise",
                "attn.out_proj": "rowwise",
                "mlp.fc_in": "colwise",
                "mlp.fc_out": "rowwise",
            },
        ),
        inner_attributes=("embed_dim",),
    ),
    "mpt": Family(
        _under(
            "transformer.blocks.*",
            {
                "attn.Wqkv": "colwise",
                "attn.out_proj": "rowwise",
                "ffn.up_proj": "colwise",
                "ffn.down_proj": "rowwise",
            },
        ),
        packed={"transformer.blocks.*.attn.Wqkv": "thirds"},
        inner_attributes=("hidden_size",),
        head_arguments={"position_bias": "heads"},
    ),
    "gpt_bigcode": Family(_under("transformer.h.*", _GPT2_LIKE), inner_attributes=("embed_dim", "kv_dim")),
    "openai-gpt": Family(
        _under("transformer.h.*", _GPT2_LIKE),
        packed={"transformer.h.*.attn.c_attn": "thirds"},
        inner_attributes=("split_size", "n_state"),
    ),
    "persimmon": Family(
        _under(
            "model.layers.*",
            {"self_attn.query_key_value": "colwise", "self_attn.dense": "rowwise", **_NEOX_LIKE},
        ),
    ),
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
        _under(
            "gpt_neox_japanese.layers.*",
            {
                "attention.query_key_value": "colwise",
                "attention.dense": "rowwise",
                "attention.dense_bias": "features",
                **_NEOX_LIKE,
            },
        ),
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
            **_under(
                "model.layers.*.attn",
                {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "Wo": "rowwise"},
            ),
            **_under("model.layers.*.mlp", {"Wi": "colwise", "Wo": "rowwise"}),
            "lm_head.dense": "latent",
            "lm_head.norm": "replicated",
        },
        packed={"model.layers.*.mlp.Wi": "halves"},
        cut_outputs=("lm_head.norm",),
    ),
    "t5gemma": Family(
        _under(
            "model.decoder.layers.*.cross_attn",
            {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"},
        ),
    ),
    "emu3_text_model": Family(_LLAMA_LIKE),
    "phi3": Family(
        packed={"*.layers.*.self_attn.qkv_proj": "q,k,v", "*.layers.*.mlp.gate_up_proj": "halves"},
        heads_from_config=True,
    ),
    "phi4_multimodal": Family(
        packed={"*.layers.*.self_attn.qkv_proj": "q,k,v", "*.layers.*.mlp.gate_up_proj": "halves"},
        heads_from_config=True,
    ),
    # Its plan names the MLP alone; attention is DeepSeek's latent attention, whose names `roles.py` knows.
    "youtu": Family(
        {"model.layers.*.self_attn.o_proj": "rowwise"},
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
