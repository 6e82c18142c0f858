"""Prepared datasets of given documents, and text to prepare."""

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fourfold.data.manifest import DatasetManifest
from fourfold.data.shards import ShardWriter, token_dtype
from fourfold.data.tokenizer import TokenizerInfo, train_tokenizer

Documents = Sequence[Sequence[int]]


def write(
    folder: Path,
    train: Documents,
    validation: Documents = (),
    *,
    shard_tokens: int = 1 << 20,
    vocab_size: int = 131,
) -> Path:
    """Write a prepared dataset of these tokens."""
    writers = {}
    for split, documents in {"train": train, "validation": validation}.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        writers[split] = ShardWriter(folder, f"{split}/000000", token_dtype(vocab_size), shard_tokens)
        for document in documents:
            writers[split].add(np.array(document))
        writers[split].close()
    shards = {split: writer.shards for split, writer in writers.items()}
    DatasetManifest(TokenizerInfo("a", vocab_size, 0), "b", 0, shards).save(folder)
    return folder


def corpus(count: int = 40) -> list[str]:
    """Source files of the standard library, as text that exists on every machine."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [file.read_text() for file in files if 2_000 < file.stat().st_size < 20_000][:count]


def as_jsonl(texts: Sequence[str], path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def small_pretrained(folder: Path, texts: Sequence[str]) -> None:
    """A small Llama with random weights, and a tokenizer of these texts, as `save_pretrained` writes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(texts, 512)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
