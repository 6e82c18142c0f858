"""What a model tells of itself: the heads of an attention whose layers differ."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fourfold.hf.anatomy import Anatomy


def test_heads_are_those_of_the_layer() -> None:
    config = AutoConfig.for_model(
        "dots3_note_text",
        num_hidden_layers=2,
        hidden_size=64,
        layer_types=["indexed_attention", "sliding_attention"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    anatomy = Anatomy(model)
    for layer in range(2):
        here = config.per_layer_config[layer]
        found = anatomy.heads(f"model.layers.{layer}.self_attn.q_b_proj")
        assert found == (here.num_attention_heads, here.num_key_value_heads)
    assert len({config.per_layer_config[layer].num_attention_heads for layer in range(2)}) == 2
