"""`fourfold checkpoint`: inspect and verify checkpoints, without starting a rank."""

from __future__ import annotations

import argparse
import math
from typing import Any

from fourfold.cli import export


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify, show and convert checkpoints",
        description="Inspect the checkpoints in a folder or under an fsspec URL. Loading them never executes code.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _action(actions, "ls", list_all, "list the checkpoints, and whether their files exist")
    verify = _action(actions, "verify", verify_all, "hash every file and compare it with the manifest")
    info = _action(actions, "info", show, "show the contents of a checkpoint")
    for action, default in ((verify, "all"), (info, "the newest")):
        action.add_argument("--step", type=int, help=f"the step of the checkpoint (default: {default})")
    info.add_argument("--tensors", action="store_true", help="list every tensor")
    export.add_to(actions, "convert")


def _action(actions: Any, name: str, run: Any, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what)
    parser.add_argument(
        "folder", help="the folder of the run's checkpoints, or an fsspec URL such as s3://bucket/run"
    )
    parser.set_defaults(run=run)
    return parser


def list_all(options: argparse.Namespace) -> int:
    from fourfold.checkpoint import retention
    from fourfold.checkpoint.commit import step_name
    from fourfold.checkpoint.folder import open_folder
    from fourfold.checkpoint.manifest import find_damage, read_manifest

    root = open_folder(options.folder)
    newest = None
    for step in retention.steps(root):
        folder = root.child(step_name(step))
        damage = find_damage(folder, step, hashes=False)
        if damage:
            print(f"{step_name(step):<14} DAMAGED  {damage[0]}")
            continue
        files = read_manifest(folder, step).files
        size = sum(record.size for record in files.values())
        print(f"{step_name(step):<14} complete  {len(files)} files, {_bytes(size)}")
        newest = step
    for name in retention.unfinished_names(root):
        print(f"{name:<14} not a checkpoint: an interrupted save or removal, or set aside as damaged")
    print(
        f"the newest is {step_name(newest)} (by sizes; `verify` compares hashes)"
        if newest is not None
        else f"no checkpoint in {root}"
    )
    return 0


def verify_all(options: argparse.Namespace) -> int:
    from fourfold.checkpoint.commit import step_name
    from fourfold.checkpoint.folder import open_folder
    from fourfold.checkpoint.manifest import find_damage, read_manifest

    root = open_folder(options.folder)
    bad = 0
    for step in _steps(root, options.step):
        folder = root.child(step_name(step))
        damage = find_damage(folder, step)
        bad += bool(damage)
        if damage:
            print("\n".join([f"{step_name(step)} DAMAGED", *(f"  {line}" for line in damage)]))
        else:
            print(f"{step_name(step)} valid, {len(read_manifest(folder, step).files)} files")
    return 1 if bad else 0


def show(options: argparse.Namespace) -> int:
    from fourfold.checkpoint.folder import open_folder
    from fourfold.checkpoint.index import tensors
    from fourfold.checkpoint.state import read_values
    from fourfold.checkpoint.storage import Reader
    from fourfold.mesh.axes import AXES

    root = open_folder(options.folder)
    step = _steps(root, options.step)[-1]
    reader = Reader(root, step)
    values = read_values(reader.folder)
    print(
        f"{reader.folder}, saved {values['saved_at']} on "
        + ", ".join(f"{axis}={size}" for axis, size in zip(AXES, values["grid"], strict=True))
    )
    for part in ("model", "optimizer"):
        found = {n: t for n, t in tensors(reader.metadata).items() if n.startswith(f"{part}.")}
        numbers = sum(math.prod(t.size) for t in found.values())
        size = sum(math.prod(t.size) * t.properties.dtype.itemsize for t in found.values())
        print(f"{part}: {len(found)} tensors, {numbers:,} values, {_bytes(size)}")
        if options.tensors:
            for name, tensor in sorted(found.items()):
                kind = str(tensor.properties.dtype).removeprefix("torch.")
                print(f"  {name} {list(tensor.size)} {kind}, {len(tensor.chunks)} pieces")
    for key in ("step", "seed", "data", "schedule", "config", "versions"):
        print(f"{key}: {values[key]}")
    return 0


def _steps(root: Any, wanted: int | None) -> list[int]:
    from fourfold.checkpoint import retention

    committed = retention.steps(root)
    if not committed:
        raise ValueError(f"there is no checkpoint in {root}")
    if wanted is not None and wanted not in committed:
        raise ValueError(
            f"there is no step-{wanted} in {root}; it has {', '.join(f'step-{s}' for s in committed)}"
        )
    return committed if wanted is None else [wanted]


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
