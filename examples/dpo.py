"""Align a chat model with TRL's DPOTrainer, on a grid of four dimensions; the reference is on the same grid.

    torchrun --nproc-per-node 8 examples/dpo.py my-model preferences.jsonl 1,2,1,4

Each line of preferences.jsonl has "prompt", "chosen" and "rejected": texts, or lists of messages.
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from fourfold.integrations.hf import trainer

folder, preferences, grid = sys.argv[1:]

# No rank holds the model, or the reference: each reads its shards from the folder.
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)

run = trainer(DPOTrainer)(
    model=model,
    checkpoint=folder,
    grid=tuple(map(int, grid.split(","))),  # (data, z, y, x)
    args=DPOConfig(
        output_dir="dpo",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        dataloader_drop_last=True,
        save_strategy="epoch",
    ),
    train_dataset=load_dataset("json", data_files=preferences, split="train"),
    processing_class=AutoTokenizer.from_pretrained(folder),
)
run.train()
run.save_model()
