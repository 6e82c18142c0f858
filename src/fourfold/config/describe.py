"""The configuration for reading: a commented starting file, a page for the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from fourfold.config.schema import CHOSEN_ALONG, EngineSection, RunConfig


@dataclass(frozen=True)
class Size:
    """A Llama, and a run that suits it."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    length: int
    batch_tokens: int
    lr: float
    steps: int
    is_tied: bool = False
    is_recomputed: bool = False
    precision: str = "bf16"


# Batches and rates as in published runs; steps make some twenty tokens a parameter, of 405b as many as its authors trained on.
SIZES = {
    "1m": Size(128, 384, 4, 4, 2, 256, 2_048, 3e-3, 100, is_tied=True, precision="fp32"),  # minutes on a CPU
    "10m": Size(256, 768, 8, 8, 4, 512, 32_768, 2e-3, 6_000, is_tied=True),
    "125m": Size(768, 2048, 12, 12, 12, 2048, 524_288, 6e-4, 5_000),
    "1b": Size(2048, 8192, 16, 32, 8, 4096, 1_048_576, 4e-4, 25_000),
    "8b": Size(4096, 14336, 32, 32, 8, 8192, 4_194_304, 3e-4, 40_000, is_recomputed=True),
    "70b": Size(8192, 28672, 80, 64, 8, 8192, 8_388_608, 1.5e-4, 150_000, is_recomputed=True),
    "405b": Size(16384, 53248, 126, 128, 8, 8192, 16_777_216, 8e-5, 900_000, is_recomputed=True),
}


def sized_model_config(size: str, vocabulary: int) -> dict[str, Any]:
    """A config.json of Llama's shape."""
    chosen = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": chosen.hidden,
        "intermediate_size": chosen.inner,
        "num_hidden_layers": chosen.layers,
        "num_attention_heads": chosen.heads,
        "num_key_value_heads": chosen.kv_heads,
        "max_position_embeddings": chosen.length,
        "vocab_size": vocabulary,
        "tie_word_embeddings": chosen.is_tied,
    }


def starting_file(size: str, *, model: str, data: str) -> str:
    """A run's TOML with every field, its value for a model of that size, and its sentence."""
    about = SIZES[size]
    chosen: dict[str, Any] = {
        "model.config": model,
        "data.sources": [{"path": data}],
        "data.sequence_length": about.length,
        "batch.tokens": about.batch_tokens,
        "optimizer.lr": about.lr,
        "schedule.steps": about.steps,
        "schedule.warmup_steps": min(2000, about.steps // 10),
        "engine.precision": about.precision,
        "engine.activation_checkpointing": "full" if about.is_recomputed else "none",
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
        if section is EngineSection and field in CHOSEN_ALONG and value == about.default:
            written = f"# {written}"  # what a file says, stays
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
