"""The plan of a prepared folder, written first, so that a second run cannot mix in other settings or inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fourfold.data.documents import FileChunk, Reading, texts_of
from fourfold.data.inputs import Input
from fourfold.data.shards import SHARD_TOKENS
from fourfold.data.tokenizer import (
    TokenizerInfo,
    load_tokenizer,
    save_tokenizer,
    tokenizer_info,
    train_tokenizer,
)
from fourfold.files import write_atomically
from fourfold.untrusted_input import read_json

NAME = "plan.json"
TRAINING_CHARACTERS = 1 << 26  # of the text that a tokenizer is trained on
TRAINING_PARTS = 64  # that this text is taken from


@dataclass(frozen=True)
class Settings:
    """The settings that the tokens depend on."""

    tokenizer: str | None = None  # a folder or hub id
    train_vocab_size: int | None = None  # or: train one of this size on the inputs
    column: str = "text"
    separator: str | None = None
    validation: float = 0.005
    split: str = "train"  # of a Hugging Face dataset
    text_suffixes: tuple[str, ...] = ()
    part_bytes: int | None = None
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train_vocab_size is None):
            given = "neither" if self.tokenizer is None else "both"
            raise ValueError(
                f"{given} of --tokenizer and --train-tokenizer is given; name a tokenizer that exists, or the size of one to "
                "train on this text, such as 8192"
            )
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation={self.validation} is not a fraction of the documents; use 0 to 0.5")
        if self.separator == "":
            raise ValueError(
                "an empty separator does not separate anything; leave it out, and a file is one document"
            )

    @property
    def reading(self) -> Reading:
        return Reading(self.column, self.separator)


def write_or_check_plan(
    folder: Path, files: Sequence[Input], settings: Settings, work: Sequence[list[FileChunk]]
) -> TokenizerInfo:
    """Write the plan of this folder, or check that it is the same as before."""
    path = folder / NAME
    before = read_json(path) if path.exists() else None
    if before is None and any(folder.iterdir()):
        _check_no_foreign_files(folder)
    trained = (
        before is not None and settings.train_vocab_size == before["settings"]["train_vocab_size"] is not None
    )
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer)
    elif trained:
        tokenizer = load_tokenizer(folder / "tokenizer")
    else:
        tokenizer = train_tokenizer(_sample(work, settings.reading), settings.train_vocab_size or 0)
    facts = tokenizer_info(tokenizer)
    plan = {
        "tokenizer": asdict(facts),
        "settings": {name: value for name, value in asdict(settings).items() if name != "tokenizer"},
        "inputs": [[str(file.path), file.bytes, file.path.stat().st_mtime_ns] for file in files],
        "parts": len(work),
    }
    plan = json.loads(json.dumps(plan))  # tuples become lists, as they come back
    if before is None:
        save_tokenizer(tokenizer, folder / "tokenizer")
        write_atomically(path, json.dumps(plan, indent=1).encode() + b"\n")
    elif before != plan:
        raise ValueError(
            f"{folder} holds another preparation: {_difference(before, plan)}; "
            "use another folder, or --overwrite to start over"
        )
    return facts


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    for name in ("tokenizer", "settings"):
        for field in before[name] | now[name]:
            old, new = before[name].get(field), now[name].get(field)
            if old != new:
                return f"its {name} {field} is {old}, this run has {new}"
    files_before, files_now = ({file[0]: file[1:] for file in plan["inputs"]} for plan in (before, now))
    for path in files_before | files_now:
        old, new = files_before.get(path), files_now.get(path)
        if old is None or new is None:
            return f"{path} is an input of {'this run' if old is None else 'it'} only"
        if old[0] != new[0]:
            return f"{path} had {old[0]} bytes, it has {new[0]} now"
        if old != new:
            return f"{path} was written again since (its time was {old[1]} ns, it is {new[1]} ns)"
    return f"its inputs came in a different order, or in {before['parts']} parts instead of {now['parts']}"


def _check_no_foreign_files(folder: Path) -> None:
    known = {"tokenizer", "tokenizer.unfinished"}  # stopped before the plan was written
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in known and ".unfinished" not in p.name)
    if foreign:
        raise ValueError(f"{folder} has other files in it, such as {foreign[0]}; use an empty folder")


def _sample(work: Sequence[list[FileChunk]], reading: Reading) -> Iterator[str]:
    """Documents from all over the inputs: the beginnings of evenly spaced parts, the same amount from each."""
    chosen = work[:: max(1, len(work) // TRAINING_PARTS)]
    for part in chosen:
        left = TRAINING_CHARACTERS // len(chosen)
        for text in texts_of(part, reading):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break
