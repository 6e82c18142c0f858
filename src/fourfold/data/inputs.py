"""From what a person names (files, folders, data sets of Hugging Face) to files, and from files to equal parts of work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.data.documents import KINDS, FileChunk, Kind, Reading, kind_of, split_file

HUB = "hf:"
MIB = 1 << 20
PART_BYTES = (4 * MIB, 256 * MIB)  # the least and the most, unless asked for
PARTS = 256  # aimed at between these limits: enough for the processes of a node, few enough as files


@dataclass(frozen=True)
class Input:
    """A file to read."""

    path: Path
    kind: Kind

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


def find_inputs(
    names: Sequence[str], *, split: str = "train", text_suffixes: Sequence[str] = ()
) -> list[Input]:
    """The files behind the names, in an order that depends on the names alone.

    A folder stands for all files in it and below whose suffix is known, or is among ``text_suffixes``; a folder that
    `datasets.Dataset.save_to_disk` wrote and ``hf:NAME`` for the Arrow files of that data set.
    """
    found: dict[Path, Input] = {}
    for name in names:
        for file in _behind(name, split, text_suffixes):
            found.setdefault(file.path, file)
    if not found:
        known = ", ".join([*KINDS, *text_suffixes])
        raise ValueError(
            f"no file in {', '.join(names)} ends in {known}; name the files, or use --text-suffix"
        )
    return list(found.values())


def parts(inputs: Sequence[Input], reading: Reading, part_bytes: int | None = None) -> list[list[FileChunk]]:
    """The work in parts of about equal size: chunks of a large file, or several small files together."""
    if part_bytes is None:
        least, most = PART_BYTES
        part_bytes = min(max(sum(i.bytes for i in inputs) // PARTS, least), most)
    grouped: list[list[FileChunk]] = []
    held = 0
    for file in inputs:
        for chunk in split_file(file.path, file.kind, reading, part_bytes):
            if not grouped or held + chunk.bytes > part_bytes:
                grouped.append([])
                held = 0
            grouped[-1].append(chunk)
            held += chunk.bytes
    return grouped


def _behind(name: str, split: str, text_suffixes: Sequence[str]) -> list[Input]:
    if name.startswith(HUB):
        return _of_the_hub(name.removeprefix(HUB), split)
    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"there is no {name}; name files or folders, or a data set of the hub as {HUB}{name}"
        )
    if path.is_file():
        # What somebody names is meant, whatever it ends in.
        return [Input(path, kind_of(path) or "text")]
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise ValueError(f"{name} has no split {split!r}; use --split with one of {', '.join(splits)}")
        path = path / split
    if (path / "state.json").exists():
        files = json.loads((path / "state.json").read_text())["_data_files"]
        return [Input(path / file["filename"], "arrow") for file in files]
    suffixes: dict[str, Kind] = {suffix: "text" for suffix in text_suffixes}
    below = [
        Input(file, kind)
        for file in sorted(path.rglob("*"))
        if file.is_file() and (kind := kind_of(file) or suffixes.get(file.suffix.lower()))
    ]
    if not below:
        known = ", ".join([*KINDS, *text_suffixes])
        raise ValueError(f"no file in {name} ends in {known}; name the files, or use --text-suffix")
    return below


def _of_the_hub(name: str, split: str) -> list[Input]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{HUB}{name} is read with datasets: pip install 'fourfold[data]'") from None
    files = load_dataset(name, split=split).cache_files
    return [Input(Path(file["filename"]), "arrow") for file in files]
