"""Damage to existing files: what disks, copies and people do to checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from fourfold.drill.drill import flip_bit


def truncate(file: Path, choose: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: choose.randrange(file.stat().st_size)])


def grow(file: Path, choose: random.Random) -> None:
    file.write_bytes(file.read_bytes() + choose.randbytes(choose.randint(1, 64)))


def delete(file: Path, choose: random.Random) -> None:
    file.unlink()


def zero(file: Path, choose: random.Random) -> None:
    """Zero one block, as if it had never been written."""
    data = bytearray(file.read_bytes())
    start = choose.choice([at for at in range(0, len(data), 512) if any(data[at : at + 512])])
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    file.write_bytes(data)


def swap_bytes(file: Path, choose: random.Random) -> None:
    """Exchange two parts of a file."""
    data = bytearray(file.read_bytes())
    for _ in range(1000):
        length = choose.randint(1, max(1, min(64, len(data) // 2)))
        a, b = choose.randrange(len(data) - length + 1), choose.randrange(len(data) - length + 1)
        if abs(a - b) >= length and data[a : a + length] != data[b : b + length]:
            data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
            file.write_bytes(data)
            return
    raise ValueError(f"{file} has no two parts that differ")


def swap_files(file: Path, other: Path) -> None:
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": flip_bit,
    "truncate": truncate,
    "grow": grow,
    "delete": delete,
    "zero": zero,
    "swap": swap_bytes,
}


def damage(folder: Path, seed: int) -> tuple[Path, str]:
    """Damage one file of a folder; the seed chooses the file and the kind of damage, which are returned."""
    choose = random.Random(seed)
    file = choose.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    kind = choose.choice(sorted(DAMAGES))
    DAMAGES[kind](file, choose)
    return file, kind
