"""Change fields in the text of a run config; comments and everything else stay as they are."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fourfold.config.run_file import ConfigError
from fourfold.files import toml_value


def with_fields(text: str, changes: Mapping[str, Mapping[str, Any]]) -> str:
    """The text with these fields of its sections set; a field in a comment is set in its place.

    Example:
        >>> print(with_fields("[grid]\\n# z = 1\\nx = 2  # tensor parallel\\n", {"grid": {"z": 4, "x": 8}}))
        [grid]
        z = 4
        x = 8  # tensor parallel
        <BLANKLINE>
    """
    lines = text.splitlines()
    for section, fields in changes.items():
        if not any(_header(line) == section for line in lines):
            lines += ["", f"[{section}]"]
        for field, value in fields.items():
            _set(lines, section, field, toml_value(value))
    changed = "\n".join(lines) + "\n"
    try:
        found = tomllib.loads(changed)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the layout cannot be written into this file ({error}); write its sections as [section]"
        ) from None
    for section, fields in changes.items():
        for field, value in fields.items():
            if found.get(section, {}).get(field) != value:
                raise ConfigError(
                    f"{section}.{field} could not be set to {toml_value(value)} in this file; write it as a line of a section "
                    f"[{section}]"
                )
    return changed


def _header(line: str) -> str | None:
    found = re.match(r"\s*\[([^\[\]]+)\]", line)
    return found[1].strip() if found else None


def _set(lines: list[str], section: str, field: str, value: str) -> None:
    start = next(i for i, line in enumerate(lines) if _header(line) == section) + 1
    end = next((i for i in range(start, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    written = re.compile(rf"\s*{re.escape(field)}\s*=[^#]*?(\s*#.*)?$")
    in_comment = re.compile(rf"\s*#\s*{re.escape(field)}\s*=")
    for i in range(start, end):
        if found := written.match(lines[i]):
            lines[i] = f"{field} = {value}{found[1] or ''}"
            return
    for i in range(start, end):
        if in_comment.match(lines[i]):
            lines[i] = f"{field} = {value}"
            return
    lines.insert(start, f"{field} = {value}")
