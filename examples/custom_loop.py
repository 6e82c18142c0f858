"""Train a small Llama."""

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
torch.manual_seed(0)
model = LlamaForCausalLM(config)
ff.parallelize(model, grid)
optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3)
batch = torch.randint(1000, (8, 64), generator=torch.Generator().manual_seed(0))
batch = batch[grid.local_rows(len(batch))].to(grid.device)  # this rank's part of the global batch

for step in range(10):
    loss = model(input_ids=batch, labels=batch).loss  # the mean over the global batch
    loss.backward()
    norm = ff.clip_grad_norm_(model.parameters(), 1.0, grid)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}", flush=True)

dist.destroy_process_group()
