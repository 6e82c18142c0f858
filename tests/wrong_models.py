"""Models for wrong requests, on meta: an error must be raised before any weights exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

VOCABULARY = 64
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER: dict[str, Any] = TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def build(model_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        return model_class(config)  # type: ignore[no-any-return]


def llama(**changes: Any) -> nn.Module:
    return build(LlamaForCausalLM, LlamaConfig(**DECODER | changes))


def mixtral(**changes: Any) -> nn.Module:
    return build(MixtralForCausalLM, MixtralConfig(**DECODER | {"num_local_experts": 4} | changes))


def differential() -> nn.Module:
    return build(DiffLlamaForCausalLM, DiffLlamaConfig(**DECODER))


def mamba() -> nn.Module:
    return build(MambaForCausalLM, MambaConfig(**TOKENS, hidden_size=64, num_hidden_layers=1))


def falcon_with_shared_keys() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "num_kv_heads": 4}
    return build(FalconForCausalLM, FalconConfig(**TOKENS, **sizes, new_decoder_architecture=True))


def norm_over_all_keys() -> nn.Module:
    return build(Olmo2ForCausalLM, Olmo2Config(**DECODER | {"num_key_value_heads": 4}))


def with_images() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(**DECODER)
    return build(
        LlavaForConditionalGeneration, LlavaConfig(text_config=text, vision_config=vision, image_token_id=3)
    )


class Perceptron(nn.Module):
    """A module that is in no plan."""

    def __init__(self, *, affine: bool = True, shift: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=affine)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.shift = nn.Parameter(torch.zeros(shift))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(self.norm(x)))) + self.shift
        return out


class Scaled(Perceptron):
    """The same, with a norm whose gain is not called weight."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.Norm()  # type: ignore[assignment]


class Embedded(Perceptron):
    """The same, with an embedding to read the hidden size from."""

    def __init__(self) -> None:
        super().__init__(affine=False)
        self.tokens = nn.Embedding(VOCABULARY, 16)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


ROLES = {"up": "colwise", "down": "rowwise", "shift": "features"}
