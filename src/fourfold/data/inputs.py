"""Resolves inputs (files, folders, Hugging Face datasets) to files, and files to parts of about equal size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fourfold.data.documents import KINDS, FileChunk, Kind, Reading, kind_of, split_file
from fourfold.untrusted_input import read_json

HUB = "hf:"
TABLES = (".csv", ".tsv")
MIB = 1 << 20
PART_BYTES = (4 * MIB, 256 * MIB)  # minimum and maximum, unless given
PARTS = 256  # the target within these limits: enough for the processes of a node, few enough files


Inputs = dict[Path, Kind]  # the files to read, in order


def find_inputs(names: Sequence[str], *, split: str = "train", text_suffixes: Sequence[str] = ()) -> Inputs:
    """The files that the names stand for, in an order that depends only on the names.

    A folder stands for all files in it and below with a known suffix or one of ``text_suffixes``; a folder written by
    `datasets.Dataset.save_to_disk`, and ``hf:NAME`` or ``hf:NAME:SUBSET``, for the Arrow files of that dataset.
    """
    found: Inputs = {}
    for name in names:
        resolved = _resolve(name, split, text_suffixes)
        if not resolved:
            known = ", ".join([*KINDS, *text_suffixes])
            raise ValueError(f"no file in {name} ends in {known}; name the files, or use --text-suffix")
        for path, kind in resolved.items():
            found.setdefault(path, kind)
    return found


def parts(inputs: Inputs, reading: Reading, part_bytes: int | None = None) -> list[list[FileChunk]]:
    """Group chunks into parts of about equal size: chunks of a large file, or several small files together."""
    if part_bytes is None:
        least, most = PART_BYTES
        part_bytes = min(max(sum(path.stat().st_size for path in inputs) // PARTS, least), most)
    grouped: list[list[FileChunk]] = []
    held = 0
    for path, kind in inputs.items():
        for chunk in split_file(path, kind, reading, part_bytes):
            if not grouped or held + chunk.bytes > part_bytes:
                grouped.append([])
                held = 0
            grouped[-1].append(chunk)
            held += chunk.bytes
    return grouped


def _resolve(name: str, split: str, text_suffixes: Sequence[str]) -> Inputs:
    if name.startswith(HUB):
        return _from_hub(name.removeprefix(HUB), split)
    path = Path(name)
    if not path.exists():
        raise ValueError(f"there is no {name}; name files or folders, or a dataset of the hub as {HUB}{name}")
    if path.is_file():
        if path.suffix.lower() in TABLES and path.suffix not in text_suffixes:
            raise ValueError(
                f"{name} is a table, whose header and rows would be one text; convert it to JSON lines or Parquet, or use "
                f"--text-suffix {path.suffix} if that is what you want"
            )
        # Any other file that is named is used, whatever its suffix.
        return {path: kind_of(path) or "text"}
    if (path / "dataset_dict.json").exists():
        splits = read_json(path / "dataset_dict.json")["splits"]
        if split not in splits:
            raise ValueError(f"{name} has no split {split!r}; use --split with one of {', '.join(splits)}")
        path = path / split
    if (path / "state.json").exists():
        files = read_json(path / "state.json")["_data_files"]
        return {path / file["filename"]: "arrow" for file in files}
    suffixes: dict[str, Kind] = {suffix: "text" for suffix in text_suffixes}
    return {
        file: kind
        for file in sorted(path.rglob("*"))
        if file.is_file() and (kind := kind_of(file) or suffixes.get(file.suffix.lower()))
    }


def _from_hub(name: str, split: str) -> Inputs:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{HUB}{name} is read with datasets: pip install 'fourfold[data]'") from None
    name, _, subset = name.partition(":")
    files = load_dataset(name, subset or None, split=split).cache_files
    return {Path(file["filename"]): "arrow" for file in files}
