"""Read a run config, and explain what is wrong in it."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fourfold.config.schema import RunConfig

MAX_BYTES = 2**20  # of a run config
# Names of other trainers (Hugging Face's TrainingArguments, torchtitan, Megatron-LM, DeepSpeed), and of older versions.
_ALIASES: dict[str, str] = json.loads(Path(__file__).with_name("aliases.json").read_text())


class ConfigError(ValueError):
    """An error in a run config: the field and the remedy."""


def load_run(path: str | Path, changes: Sequence[str] = ()) -> RunConfig:
    """Load a run config, with ``changes`` like ``optimizer.lr=3e-4``."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path} does not exist; `fourfold init {path}` writes a starting file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ConfigError(
            f"{path} has {size} bytes; a run config has a few thousand, and at most {MAX_BYTES}"
        )
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for change in changes:
        apply(values, change)
    return from_dict(values)


def from_dict(values: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_message(e) for e in error.errors())) from None


def apply(values: dict[str, Any], change: str) -> None:
    """Set a field of the file's values; a value that is not TOML is taken as text.

    Example:
        >>> values = {"optimizer": {"lr": 1e-3}}
        >>> apply(values, "optimizer.lr=3e-4")
        >>> apply(values, "model.config=tiny/config.json")
        >>> values
        {'optimizer': {'lr': 0.0003}, 'model': {'config': 'tiny/config.json'}}
    """
    name, equals, text = change.partition("=")
    if not equals:
        raise ConfigError(f"{change!r} sets nothing; write section.field=value, such as optimizer.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, field = name.strip().split(".")
    for depth, section in enumerate(sections, start=1):
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            path = ".".join(sections[:depth])
            raise ConfigError(f"{change!r} sets nothing: {path} is not a section; set all of it, {path}=...")
    values[field] = value


# -- error messages ---------------------------------------------------------------------------------------------------


def _message(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = list(fields_at(path[:-1]))
        section = error["input"] if isinstance(error["input"], dict) else {}
        near = _near(path[-1], known) or [n for field in section for n in _near(field, [])]
        hint = f"did you mean {near[0]!r}? It" if near else "it"
        where = f"[{'.'.join(path[:-1])}]" if path[:-1] else "the file"
        return f"{where} has no field {path[-1]!r}; {hint} has {', '.join(known)}"
    if error["type"] == "missing":
        about = fields_at(path[:-1]).get(path[-1])
        return f"{name} is missing: {about.description if about and about.description else 'a section of its own'}"
    said = error["msg"].removeprefix("Value error, ")
    given = "" if isinstance(error["input"], dict) else f" (it is {error['input']!r})"
    return f"{name}{given}: {said}" if name else said


def _near(name: str, known: Sequence[str]) -> list[str]:
    """What a field of another name could mean: one that other trainers call so, one in another section, or a similar one."""
    name = name.lower().replace("-", "_")
    if name in _ALIASES:
        return [_ALIASES[name]]
    elsewhere = [f"{section}.{name}" for section in RunConfig.model_fields if name in fields_at([section])]
    return elsewhere or difflib.get_close_matches(name, known, 1)


def fields_at(path: Sequence[str]) -> dict[str, Any]:
    """The fields of the section at a path such as ("data", "sources", "0")."""
    kind: Any = RunConfig
    for part in path:
        if part.isdigit():
            continue
        kind = _section_of(kind.model_fields[part].annotation)
        if kind is None:
            return {}
    return dict(kind.model_fields)


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None:
        return next((s for a in get_args(annotation) if (s := _section_of(a)) is not None), None)
    return None
