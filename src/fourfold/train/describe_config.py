"""The configuration for reading: a commented starting file, a page for the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from fourfold.train.config import RunConfig

# name: (hidden, inner, layers, heads, key/value heads, length, tokens of a step, learning rate), Llama's shape
SIZES = {
    "10m": (256, 768, 8, 8, 4, 512, 32_768, 1e-3),
    "125m": (768, 2048, 12, 12, 12, 2048, 524_288, 6e-4),
    "1b": (2048, 8192, 16, 32, 8, 4096, 1_048_576, 4e-4),
    "8b": (4096, 14336, 32, 32, 8, 8192, 4_194_304, 3e-4),
    "70b": (8192, 28672, 80, 64, 8, 8192, 8_388_608, 1.5e-4),
    "405b": (16384, 53248, 126, 128, 8, 8192, 16_777_216, 8e-5),
}


def model_config(size: str, vocabulary: int) -> dict[str, Any]:
    """A config.json of Llama's shape."""
    hidden, inner, layers, heads, kv_heads, length, _, _ = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
        "tie_word_embeddings": size == "10m",
    }


def starting_file(size: str, *, model: str, data: str) -> str:
    """A run's TOML with every field, its value for a model of that size, and its sentence."""
    *_, length, tokens, lr = SIZES[size]
    chosen: dict[str, Any] = {
        "model.config": model,
        "data.sources": [{"path": data}],
        "data.sequence_length": length,
        "batch.tokens": tokens,
        "optimizer.lr": lr,
        "engine.activation_checkpointing": "full" if size in ("8b", "70b", "405b") else "none",
    }
    lines = [
        f"# A run of a {size.upper()} model. `fourfold train` reads it; --set section.field=value changes it."
    ]
    lines += _lines(RunConfig, "", chosen)
    return "\n".join(lines) + "\n"


def _lines(section: type[BaseModel], name: str, chosen: dict[str, Any]) -> Iterator[str]:
    tables: list[tuple[str, type[BaseModel]]] = []
    for field, about in section.model_fields.items():
        path = f"{name}.{field}" if name else field
        kind = about.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            tables.append((path, kind))
            continue
        value = chosen.get(path, None if about.is_required() else about.default)
        written = f"{field} = {toml_value(value)}" if value is not None else f"# {field} ="
        yield f"# {about.description}"
        yield written
    for path, kind in tables:
        yield ""
        yield f"# {kind.__doc__}"
        yield f"[{path}]"
        yield from _lines(kind, path, chosen)


def toml_value(value: Any) -> str:
    """
    Example:
        >>> toml_value([{"path": "text", "weight": 2.0}])
        '[{path = "text", weight = 2.0}]'
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return json.dumps(str(value))


def reference() -> str:
    """The docs page: a table for each section."""
    lines = ["# The run's file", ""]
    for path, kind in _sections(RunConfig, ""):
        lines += [f"## {f'`[{path}]`' if path else 'At the top'}", "", str(kind.__doc__), ""]
        lines += ["| field | default | what it does |", "|---|---|---|"]
        for field, about in kind.model_fields.items():
            if isinstance(about.annotation, type) and issubclass(about.annotation, BaseModel):
                continue
            default = (
                "required"
                if about.is_required()
                else toml_value(about.default)
                if about.default is not None
                else "none"
            )
            lines.append(f"| `{field}` | `{default}` | {about.description} |")
        lines.append("")
    return "\n".join(lines)


def _sections(section: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, section
    for field, about in section.model_fields.items():
        kind = about.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _sections(kind, f"{name}.{field}" if name else field)
