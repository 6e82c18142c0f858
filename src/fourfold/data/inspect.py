"""Print what a prepared folder holds."""

from __future__ import annotations

from pathlib import Path

from fourfold.data.manifest import SPLITS, DatasetManifest
from fourfold.data.samples import Samples
from fourfold.data.tokenizer import load_tokenizer


def describe(folder: Path, manifest: DatasetManifest) -> str:
    """The contents of a prepared folder, as lines."""
    tokenizer = manifest.tokenizer
    lines = [
        f"{folder}: fingerprint {manifest.fingerprint}",
        f"  tokenizer   {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint}",
        f"  source      {manifest.source_bytes:,} bytes, fingerprint {manifest.source}",
    ]
    for split in SPLITS:
        lines.append(
            f"  {split:<11} {manifest.tokens(split):,} tokens of {manifest.documents(split):,} documents in "
            f"{len(manifest.shards[split])} shards of {manifest.dtype.name}"
        )
    return "\n".join(lines)


def show(folder: Path, length: int, count: int) -> None:
    """Print the text of the first training samples."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    samples = Samples(folder, "train", length)
    for number in range(min(count, len(samples))):
        print(f"-- sample {number}\n{tokenizer.decode(samples[number].input_ids)}")
