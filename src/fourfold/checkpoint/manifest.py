"""The manifest: every file of a checkpoint with its size and hash, written last.

A folder without a manifest is not a checkpoint. Files that the manifest does not list are never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import xxhash

from fourfold.checkpoint.folder import FileRecord, Folder
from fourfold.untrusted_input import natural, parse_json, plain_name, word

MANIFEST = "manifest.json"
FORMAT = 1
MAX_JSON_BYTES = 2**30  # so that a corrupt or hostile file does not fill the memory
BLOCK_BYTES = 16 * 2**20  # hashed at a time


class CorruptCheckpointError(ValueError):
    """A checkpoint differs from what was written; the message names the file."""


def manifest_bytes(step: int, files: Mapping[str, FileRecord]) -> bytes:
    """The manifest as JSON, with a hash of itself, because no manifest lists the manifest."""
    body = {"format": FORMAT, "step": step, "files": {name: asdict(record) for name, record in files.items()}}
    return dump_json({**body, "xxh3_128": xxhash.xxh3_128_hexdigest(dump_json(body))})


def read_manifest(folder: Folder, step: int) -> dict[str, FileRecord]:
    """The files of the checkpoint in ``folder``; `CorruptCheckpointError` if there is no valid manifest of ``step``."""
    body = read_json(folder, MANIFEST)
    said = body.pop("xxh3_128", None)
    found = xxhash.xxh3_128_hexdigest(dump_json(body))
    if said != found:
        raise CorruptCheckpointError(f"{folder}/{MANIFEST}: its hash is {found}, but it says {said!r:.80}")
    if body.get("format") != FORMAT:
        raise CorruptCheckpointError(
            f"{folder}/{MANIFEST}: is of format {body.get('format')!r:.80}, this version reads {FORMAT}; use the version "
            "of Fourfold that wrote it"
        )
    if body.get("step") != step:
        raise CorruptCheckpointError(
            f"{folder}/{MANIFEST}: is of step {body.get('step')!r:.80}, but is in the folder of step {step}"
        )
    try:
        return {
            plain_name(name): FileRecord(natural(record["size"]), word(record["xxh3_128"]))
            for name, record in body["files"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptCheckpointError(f"{folder}/{MANIFEST}: has no valid list of files ({error})") from error


def find_damage(
    folder: Folder, step: int, *, part: int = 0, parts: int = 1, hashes: bool = True
) -> list[str]:
    """The problems of a checkpoint's files; empty if there are none.

    ``parts`` ranks share the files; without ``hashes`` only sizes are compared.
    """
    try:
        files = read_manifest(folder, step)
    except CorruptCheckpointError as error:
        return [str(error)]
    damage = []
    for name, record in sorted(files.items())[part::parts]:
        size = folder.size(name)
        if size is None:
            damage.append(f"{folder}/{name}: is missing, the manifest has it with {record.size} bytes")
        elif size != record.size:
            damage.append(f"{folder}/{name}: has {size} bytes, the manifest says {record.size}")
        elif hashes:
            found = hash_file(folder, name, size)
            if found != record.xxh3_128:
                damage.append(f"{folder}/{name}: has hash {found}, the manifest says {record.xxh3_128}")
    return damage


def hash_file(folder: Folder, name: str, size: int) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, size, BLOCK_BYTES):
        digest.update(folder.read(name, start, min(start + BLOCK_BYTES, size)))
    return digest.hexdigest()


# -- JSON --------------------------------------------------------------------------------------------------------------


def dump_json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def read_json(folder: Folder, name: str) -> dict[str, Any]:
    size = folder.size(name)
    if size is None:
        raise CorruptCheckpointError(f"{folder}/{name}: is missing")
    if size > MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            f"{folder}/{name}: has {size} bytes, more than the limit of {MAX_JSON_BYTES}"
        )
    try:
        return parse_json(folder.read(name), f"{folder}/{name}:")
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error
