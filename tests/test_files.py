"""Small files: atomic writes, and TOML values that read back to the same."""

import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fourfold import files


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.json"
    files.write_atomically(path, "old")
    with patch("os.fsync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    files.write_atomically(path, b"new")
    assert path.read_text() == "new"


def test_appended_lines_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    with files.open_append(path) as file:
        file.write(b"1\n")
        assert path.read_bytes() == b"1\n"
    with files.open_append(path) as file:
        file.write(b"2\n")
    assert path.read_bytes() == b"1\n2\n"


@pytest.mark.parametrize(
    "value", [True, 3, 1e-30, float("inf"), 'a "quoted" \\ line\n', "é 😀", [1, 2], {"a": [{"b": "c"}]}]
)
def test_toml_values_read_back_to_the_same(value: Any) -> None:
    assert tomllib.loads(f"value = {files.toml_value(value)}") == {"value": value}
