"""`manifest.json` of a prepared dataset, written last: a folder with a manifest is complete."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xxhash

from fourfold.data.shards import Shard, find_damage, token_dtype
from fourfold.data.tokenizer import TokenizerInfo
from fourfold.files import write_atomically
from fourfold.untrusted_input import natural, read_json, word

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
    source_bytes: int
    shards: dict[Split, list[Shard]]

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

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "tokenizer": asdict(self.tokenizer),
            "source": self.source,
            "source_bytes": self.source_bytes,
            "shards": {split: [shard.to_json() for shard in self.shards[split]] for split in SPLITS},
        }

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
            return DatasetManifest(
                TokenizerInfo.from_json(values["tokenizer"]),
                word(values["source"]),
                natural(values["source_bytes"]),
                {split: [Shard.from_json(shard) for shard in values["shards"][split]] for split in SPLITS},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not valid ({error!r:.200}); copy the folder again") from error

    def find_damage(self, folder: Path, *, contents: bool) -> list[str]:
        """Problems of the files; with ``contents`` every byte is read."""
        shards = [shard for split in SPLITS for shard in self.shards[split]]
        return list(find_damage(folder, shards, self.dtype, contents=contents))
