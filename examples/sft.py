"""Fine-tune a chat model with TRL's SFTTrainer, on a grid of four dimensions. After a stop, run the same command again.

    torchrun --nproc-per-node 8 examples/sft.py my-model chats.jsonl 1,8,1,1

Each line of chats.jsonl has "messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...].
"""

import sys
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from fourfold.integrations.hf import trainer

folder, chats, grid = sys.argv[1:]

# No rank holds the model: each reads its shards from the folder.
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)

run = trainer(SFTTrainer)(
    model=model,
    checkpoint=folder,
    grid=tuple(map(int, grid.split(","))),  # (data, z, y, x)
    args=SFTConfig(
        output_dir="sft",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_length=2048,
        packing=True,
        assistant_only_loss=True,
        dataloader_drop_last=True,
        save_strategy="epoch",
    ),
    train_dataset=load_dataset("json", data_files=chats, split="train"),
    processing_class=AutoTokenizer.from_pretrained(folder),
)
run.train(resume_from_checkpoint=get_last_checkpoint("sft") if Path("sft").is_dir() else None)
run.save_model()
