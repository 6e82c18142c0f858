"""Writes a run config of plain values as TOML."""

from typing import Any

from fourfold.files import toml_value


def to_toml(values: dict[str, Any]) -> str:
    lines = [f"{name} = {toml_value(value)}" for name, value in values.items() if not isinstance(value, dict)]
    for section, fields in values.items():
        if isinstance(fields, dict):
            lines += [f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"
