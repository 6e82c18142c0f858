"""Print what checkpoints hold, and verify them, without starting a rank."""

from __future__ import annotations

import math

from rich.filesize import decimal

from fourfold.checkpoint import commit
from fourfold.checkpoint.commit import step_name
from fourfold.checkpoint.folder import open_folder
from fourfold.checkpoint.manifest import find_damage, read_manifest
from fourfold.checkpoint.state import read_values
from fourfold.checkpoint.storage import Reader, tensors
from fourfold.mesh.axes import AXES


def list_all(path: str) -> None:
    """Print every checkpoint, and whether its files exist with the right size."""
    root = open_folder(path)
    newest = None
    for step in commit.steps(root):
        folder = root.child(step_name(step))
        damage = find_damage(folder, step, hashes=False)
        if damage:
            print(f"{step_name(step):<14} DAMAGED  {damage[0]}")
            continue
        files = read_manifest(folder, step)
        size = sum(record.size for record in files.values())
        print(f"{step_name(step):<14} complete  {len(files)} files, {decimal(size)}")
        newest = step
    for name in commit.unfinished_names(root):
        print(f"{name:<14} not a checkpoint: an interrupted save or removal, or set aside as damaged")
    print(
        f"the newest is {step_name(newest)} (by sizes; `verify` compares hashes)"
        if newest is not None
        else f"no checkpoint in {root}"
    )


def verify(path: str, step: int | None) -> bool:
    """Compare the files of one or all checkpoints with their hashes; are all valid?"""
    root = open_folder(path)
    is_valid = True
    for number in commit.select(root, commit.steps(root), step):
        folder = root.child(step_name(number))
        damage = find_damage(folder, number)
        if damage:
            is_valid = False
            print("\n".join([f"{step_name(number)} DAMAGED", *(f"  {line}" for line in damage)]))
        else:
            print(f"{step_name(number)} valid, {len(read_manifest(folder, number))} files")
    return is_valid


def show(path: str, step: int | None, *, with_tensors: bool) -> None:
    """Print the contents of one checkpoint, by default of the newest."""
    root = open_folder(path)
    reader = Reader(root, commit.select(root, commit.steps(root), step)[-1])
    values = read_values(reader.folder)
    print(
        f"{reader.folder}, saved {values['saved_at']} on "
        + ", ".join(f"{axis}={size}" for axis, size in zip(AXES, values["grid"], strict=True))
    )
    for part in ("model", "optimizer"):
        found = {n: t for n, t in tensors(reader.metadata).items() if n.startswith(f"{part}.")}
        count = sum(math.prod(t.size) for t in found.values())
        size = sum(math.prod(t.size) * t.properties.dtype.itemsize for t in found.values())
        print(f"{part}: {len(found)} tensors, {count:,} values, {decimal(size)}")
        if with_tensors:
            for name, tensor in sorted(found.items()):
                kind = str(tensor.properties.dtype).removeprefix("torch.")
                print(f"  {name} {list(tensor.size)} {kind}, {len(tensor.chunks)} pieces")
    for key in ("step", "seed", "data", "schedule", "config", "versions"):
        print(f"{key}: {values[key]}")
