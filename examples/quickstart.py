"""Train a small Llama on every rank that torchrun started."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff

grid = ff.Grid.create((1, 2, 2, 2))  # data, z, y, x: 8 ranks

config = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1000,
)
with torch.device("meta"):  # no rank ever holds the whole model
    model = LlamaForCausalLM(config)
report = ff.parallelize(model, grid, seed=0)
if dist.get_rank() == 0:
    print(report)

optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)
ids = torch.randint(1000, (8, 64), generator=generator)  # the global batch: 8 sequences
ids = ids[grid.local_rows(len(ids))].to(grid.device)  # this rank's part of it

for step in range(10):
    loss = model(input_ids=ids, labels=ids).loss  # the mean over the global batch
    loss.backward()
    norm = ff.clip_grad_norm_(model.parameters(), 1.0, grid)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}", flush=True)

dist.destroy_process_group()
