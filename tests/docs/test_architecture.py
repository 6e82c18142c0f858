"""The walk through the code names files and packages that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "development" / "architecture.md").read_text()


def test_every_file_of_the_walk_exists() -> None:
    named = set(re.findall(r"`((?:src|tests)/[\w/]+\.py)`", PAGE))
    assert len(named) > 15
    assert [file for file in sorted(named) if not (ROOT / file).is_file()] == []


def test_every_package_is_described() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    packages = {path.parent.name for path in (ROOT / "src" / "fourfold").glob("*/__init__.py")}
    assert packages <= described
