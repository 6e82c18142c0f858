"""Text made from the schema: a commented starting file and the reference page of the docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fourfold.config.schema import CHOSEN_ALONG, EngineSection, GridSection, RunConfig
from fourfold.files import toml_value


@dataclass(frozen=True)
class Size:
    """A Llama, and a run config that suits it."""

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
    is_large: bool = False
    precision: str = "bf16"


# Batches and learning rates as in published runs; steps give about 20 tokens per parameter, for 405b as in its paper.
SIZES = {
    "1m": Size(128, 384, 4, 4, 2, 256, 2_048, 3e-3, 100, is_tied=True, precision="fp32"),  # minutes on a CPU
    "10m": Size(256, 768, 8, 8, 4, 512, 32_768, 2e-3, 6_000, is_tied=True),
    "125m": Size(768, 2048, 12, 12, 12, 2048, 524_288, 6e-4, 5_000),
    "1b": Size(2048, 8192, 16, 32, 8, 4096, 1_048_576, 4e-4, 25_000),
    "8b": Size(4096, 14336, 32, 32, 8, 8192, 4_194_304, 3e-4, 40_000, is_large=True),
    "70b": Size(8192, 28672, 80, 64, 8, 8192, 8_388_608, 1.5e-4, 150_000, is_large=True),
    "405b": Size(16384, 53248, 126, 128, 8, 8192, 16_777_216, 8e-5, 900_000, is_large=True),
    "1t": Size(24576, 81920, 136, 192, 8, 8192, 33_554_432, 5e-5, 600_000, is_large=True),
}


def sized_model_config(size: str, vocabulary: int) -> dict[str, Any]:
    """The config.json of a Llama of this size."""
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


def nearest_size(hidden: int) -> str:
    """The largest size that is not wider than a model, whose settings suit it.

    Example:
        >>> nearest_size(5120)
        '8b'
    """
    narrower = [name for name, size in SIZES.items() if size.hidden <= hidden]
    return narrower[-1] if narrower else next(iter(SIZES))


def pretraining(size: str) -> dict[str, Any]:
    """The fields of a run config that trains a model of this size from random init."""
    suited = SIZES[size]
    return {
        "data.sequence_length": suited.length,
        "batch.tokens": suited.batch_tokens,
        "optimizer.lr": suited.lr,
        "schedule.steps": suited.steps,
        "schedule.warmup_steps": min(2000, suited.steps // 10),
        "engine.precision": suited.precision,
    }


# Of fine-tuning, as published recipes have them: sequences of a batch, and the longest sequence.
_FINE_TUNING_BATCH = 64
_LEAST_BATCH, _ENOUGH_STEPS = 8, 100
FINE_TUNING_LENGTH = 4096


def fine_tuning(size: str, *, positions: int, train_tokens: int, epochs: int = 1) -> dict[str, Any]:
    """The fields of a run config that goes ``epochs`` times through the text from pretrained weights.

    ``size`` is about that of the model, ``positions`` are the longest sequence that it takes.
    """
    length = min(positions, FINE_TUNING_LENGTH)
    sequences = _FINE_TUNING_BATCH
    while sequences > _LEAST_BATCH and epochs * train_tokens < _ENOUGH_STEPS * sequences * length:
        sequences //= 2  # little text: more steps of fewer sequences
    tokens = sequences * length
    steps = max(1, epochs * train_tokens // tokens)
    return {
        "data.sequence_length": length,
        "batch.tokens": tokens,
        "optimizer.lr": 1e-5 if SIZES[size].is_large else 2e-5,
        "optimizer.weight_decay": 0.0,
        "schedule.steps": steps,
        "schedule.warmup_steps": -(-steps * 3 // 100),
        "schedule.min_lr_ratio": 0.0,
        "evaluation.every_steps": min(200, max(1, steps // 10)),
        "checkpoints.every_steps": min(200, max(1, steps // 4)),
    }


def starting_file(about: str, chosen: Mapping[str, Any]) -> str:
    """A run config with every field, its description, and its default or what was ``chosen``."""
    lines = [f"# {about} `fourfold train` reads it; --set section.field=value changes it."]
    for path, section in _sections(RunConfig, ""):
        lines += ["", f"# {_sentences(section)}", f"[{path}]"] if path else []
        for field, described in _fields(section):
            name = f"{path}.{field}" if path else field
            value = chosen.get(name, None if described.is_required() else described.default)
            written = f"{field} = {toml_value(value)}" if value is not None else f"# {field} ="
            # Set in a file, these would not be chosen when the run starts.
            is_open = section is GridSection or (section is EngineSection and field in CHOSEN_ALONG)
            if is_open and name not in chosen and not written.startswith("#"):
                written = f"# {written}"
            lines += [f"# {described.description}", written]
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The reference page: a table for each section."""
    lines = ["# Run config", ""]
    for path, kind in _sections(RunConfig, ""):
        lines += [f"## {f'`[{path}]`' if path else 'At the top'}", "", _sentences(kind), ""]
        lines += ["| field | default | what it does |", "|---|---|---|"]
        for field, about in _fields(kind):
            given = "none" if about.default is None else toml_value(about.default)
            default = "required" if about.is_required() else given
            lines.append(f"| `{field}` | `{default}` | {about.description} |")
        lines.append("")
    return "\n".join(lines)


def _sentences(section: type[BaseModel]) -> str:
    """The description of a section in one line."""
    return " ".join(str(section.__doc__).split())


def _sections(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(path, section) of this section and of all below it."""
    yield path, section
    for field, about in section.model_fields.items():
        if _is_section(about.annotation):
            yield from _sections(about.annotation, f"{path}.{field}" if path else field)


def _fields(section: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [
        (name, field) for name, field in section.model_fields.items() if not _is_section(field.annotation)
    ]


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
