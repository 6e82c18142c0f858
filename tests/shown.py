"""What examples are shown on: a world of one rank, a small parallel model, an optimizer and a batch."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff


def small_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=131
    )


def names(folder: str) -> dict[str, object]:
    """What an example may use without having made it."""
    torch.manual_seed(0)
    config = small_config()
    grid = ff.Grid.create((1, 1, 1, 1))
    model = LlamaForCausalLM(config)
    report = ff.parallelize(model, grid)
    return {
        "grid": grid,
        "model": model,
        "report": report,
        "optimizer": ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3),
        "ids": torch.randint(131, (2, 8)),
        "items": 14,
        "folder": Path(folder),
        "config": config,
        "LlamaForCausalLM": LlamaForCausalLM,
    }
