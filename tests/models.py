"""Small models and batches, the same in every process, and the comparison of shards with full tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fourfold import Grid, Report

VOCABULARY = 131  # divides over no axis
COMMON = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA_LIKE = COMMON | {
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GPT2_LIKE = COMMON | {
    "n_inner": 64,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MODELS: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA_LIKE),
    # So many heads that four ranks do not divide them.
    "llama of 6 heads": (
        LlamaForCausalLM,
        LlamaConfig,
        LLAMA_LIKE | {"hidden_size": 48, "num_attention_heads": 6},
    ),
    # Whose rows have whole blocks of NF4, also cut in two.
    "wide llama": (
        LlamaForCausalLM,
        LlamaConfig,
        LLAMA_LIKE | {"hidden_size": 128, "intermediate_size": 256},
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2_LIKE),
    "gpt_neox_japanese": (
        GPTNeoXJapaneseForCausalLM,
        GPTNeoXJapaneseConfig,
        COMMON | {"intermediate_multiple_size": 2, "max_position_embeddings": 64, "attention_dropout": 0.0},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, LLAMA_LIKE),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, LLAMA_LIKE | {"head_dim": 8}),
    # Whose first layer has linear attention, with twice as many heads of values as of keys.
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        LLAMA_LIKE
        | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        LLAMA_LIKE | {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    # With the auxiliary loss of routers.
    "balanced qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        LLAMA_LIKE
        | {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        | {"output_router_logits": True, "router_aux_loss_coef": 0.3},
    ),
    # Whose routers have a correction bias; the first layer is dense.
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        LLAMA_LIKE
        | {"head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, LLAMA_LIKE | {"head_dim": 8, "attn_implementation": "eager"}),
}


def construct(kind: str, **changes: Any) -> PreTrainedModel:
    """The model as its own constructor makes it, on the default device."""
    model_class, config_class, options = MODELS[kind]
    return model_class(config_class(**options | changes)).train()


def build(kind: str, **changes: Any) -> PreTrainedModel:
    """A model with random numbers in every parameter: biases start at 0 and norms at 1, where faults would hide."""
    torch.manual_seed(0)
    model = construct(kind, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(rows: int, length: int = 12, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and labels; each row has a different number of labels."""
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % (length - 1)] = -100
    return ids, labels


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
    return found


def part(whole: Mapping[str, Tensor], report: Report, grid: Grid, name: str) -> Tensor:
    """The slice of a Hugging Face tensor that this rank stores as its shard of parameter ``name``."""
    layout = report.layouts[name]
    return layout.of(whole[layout.hf_name], layout.shard(grid))


def assert_shards_close(
    local: Mapping[str, Tensor], whole: Mapping[str, Tensor], report: Report, grid: Grid, bar: float = 1e-4
) -> None:
    """Each shard equals its slice of the full tensor, within ``bar`` of that tensor's largest entry."""
    assert set(local) == set(report.layouts)
    for name, shard in local.items():
        scale = float(whole[report.layouts[name].hf_name].abs().max())
        torch.testing.assert_close(
            shard,
            part(whole, report, grid, name),
            rtol=0.0,
            atol=bar * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def local_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), f"{name} has no gradient on the grid"
        found[name] = parameter.grad.to_local().clone()
    return found


def local_parameters(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not on the grid"
        found[name] = parameter.to_local().detach()
    return found
