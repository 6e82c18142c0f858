"""`manifest.json` of a prepared dataset, written last: a folder with a manifest is complete."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import xxhash
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from fourfold.data.shards import Shard, find_damage, token_dtype
from fourfold.data.tokenizer import TokenizerInfo
from fourfold.files import write_atomically
from fourfold.untrusted_input import Natural, read_json

FORMAT = 1
NAME = "manifest.json"
SPLIT_SALT = 0x5EED  # so that the split does not depend on the hash of a document's text used elsewhere

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


def split_of(text: str, validation: float) -> Split:
    """The split of a document, by its text alone: two copies are always in the same split."""
    drawn = xxhash.xxh3_64_intdigest(text.encode(), SPLIT_SALT) / 2.0**64
    return "validation" if drawn < validation else "train"


@dataclass(frozen=True)
class DatasetManifest:
    """A prepared dataset."""

    tokenizer: TokenizerInfo
    source: str  # fingerprint of every document's text, in order
    source_bytes: Natural
    shards: Annotated[dict[Split, list[Shard]], Field(min_length=len(SPLITS))]

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.tokenizer.vocab_size)

    def tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.shards[split])

    def documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.shards[split])

    @property
    def fingerprint(self) -> str:
        """A hash of every token and document boundary, through the hashes of the shards."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), sort_keys=True).encode())

    @property
    def has_chats(self) -> bool:
        """Does each token say whether the loss counts it?"""
        return any(shard.loss_xxh3 is not None for shards in self.shards.values() for shard in shards)

    def to_json(self) -> dict[str, Any]:
        shards = {split: [shard.to_json() for shard in shards] for split, shards in self.shards.items()}
        return {"format": FORMAT, **asdict(self), "shards": shards}

    def save(self, folder: Path) -> None:
        write_atomically(folder / NAME, json.dumps(self.to_json(), indent=1).encode() + b"\n")

    @staticmethod
    def load(folder: Path) -> DatasetManifest:
        path = folder / NAME
        if not path.exists():
            begun = "was begun but not finished: run the same `fourfold data prepare` again to continue"
            none = f"was not prepared; `fourfold data prepare {folder} TEXT...` does it"
            raise ValueError(
                f"{folder} has no {NAME}: it {begun if (folder / 'plan.json').exists() else none}"
            )
        values = read_json(path)
        if values.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {values.get('format')!r:.80}, this version reads {FORMAT}; prepare the text again"
            )
        try:
            return TypeAdapter(DatasetManifest).validate_python(values)
        except ValueError as error:
            raise ValueError(f"{path} is not valid ({error!r:.200}); copy the folder again") from error

    def describe(self, folder: Path) -> str:
        """The contents of the prepared ``folder``, as lines."""
        lines = [
            f"{folder}: fingerprint {self.fingerprint}",
            f"  tokenizer   {self.tokenizer.vocab_size:,} tokens, fingerprint {self.tokenizer.fingerprint}",
            f"  source      {self.source_bytes:,} bytes, fingerprint {self.source}",
        ]
        kind = "chats" if self.has_chats else "documents"
        for split in SPLITS:
            lines.append(
                f"  {split:<11} {self.tokens(split):,} tokens of {self.documents(split):,} {kind} in "
                f"{len(self.shards[split])} shards of {self.dtype.name}"
            )
        return "\n".join(lines)

    def find_damage(self, folder: Path, *, contents: bool) -> list[str]:
        """Problems of the files; with ``contents`` every byte is read."""
        shards = [shard for split in SPLITS for shard in self.shards[split]]
        return list(find_damage(folder, shards, self.dtype, contents=contents))
