"""The model card, written from the checkpoint and the log of the run alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fourfold.export.weights import Weights
from fourfold.mesh.axes import AXES
from fourfold.train.observe.metrics import METRICS, read_metrics

Row = tuple[str, str]

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
---
"""
USE = """```python
from transformers import AutoModelForCausalLM{more}

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"){line}
```
"""


def model_card(values: dict[str, Any], weights: Weights, tokenizer: str | None, loader: str) -> str:
    """README.md of an exported folder. ``tokenizer`` is a fingerprint, ``loader`` its class in transformers. Unknown facts are left out."""
    architecture = value_at(values, "model", "architectures")
    name = architecture[0] if architecture else "A model"
    parts = [
        HEAD if values["model"] is not None else "",
        f"# {_cell(name)}, step {values['step']}\n",
        "Trained with Fourfold. This page was written from the checkpoint and the log of the run.\n",
        _use(loader if tokenizer is not None else None) if values["model"] is not None else "",
        _section("Model", _model(values["model"], weights, tokenizer)),
        _section("Training", _training(values)),
        _section("Loss", _losses(values)),
        _data(values),
        _section("Versions", sorted((value_at(values, "versions") or {}).items())),
    ]
    return "\n".join(part for part in parts if part)


def _use(loader: str | None) -> str:
    if loader is None:
        return USE.format(more="", line="")
    line = f'\ntokenizer = {loader}.from_pretrained("path/to/this/folder")'
    return USE.format(more=f", {loader}", line=line)


# -- sections ------------------------------------------------------------------------------------------------------


def _model(model: Any, weights: Weights, tokenizer: str | None) -> Iterable[Row]:
    yield from _given(model, ("kind", "model_type"))
    yield "parameters", f"{weights.parameters:,}"
    yield "weights", f"{str(weights.dtype).removeprefix('torch.')}, {weights.bytes:,} bytes"
    yield from _given(
        model,
        ("layers", "num_hidden_layers", "n_layer"),
        ("hidden features", "hidden_size", "n_embd"),
        ("inner features", "intermediate_size", "n_inner"),
        ("attention heads", "num_attention_heads", "n_head"),
        ("key and value heads", "num_key_value_heads"),
        ("features of a head", "head_dim"),
        ("vocabulary", "vocab_size"),
        ("longest sequence", "max_position_embeddings", "n_positions"),
        ("tied embeddings", "tie_word_embeddings"),
    )
    if tokenizer is not None:
        yield "tokenizer", f"fingerprint {tokenizer}"


def _training(values: dict[str, Any]) -> Iterable[Row]:
    config = values["config"]
    for kind, words in (("pretrained", "the weights of {}"), ("config", "random init, {}")):
        if (where := value_at(config, "model", kind)) is not None:
            yield "began from", words.format(where)
    steps = value_at(config, "schedule", "steps")
    yield "step", f"{values['step']:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    samples, length = value_at(values, "data", "samples"), value_at(values, "data", "sequence_length")
    if isinstance(samples, int) and isinstance(length, int):
        yield "tokens seen", f"{samples * length:,} ({samples:,} samples of {length:,})"
    if (tokens := value_at(config, "batch", "tokens")) is not None:
        yield "batch", f"{_plain(tokens)} tokens"
    yield from _settings(config, "optimizer", "name", "lr", "betas", "eps", "weight_decay", "grad_clip_norm")
    yield from _settings(config, "schedule", "kind", "warmup_steps", "decay_steps", "min_lr_ratio")
    if (precision := value_at(config, "engine", "precision")) is not None:
        yield "precision", f"{precision}, fp32 master weights"
    grid = values["grid"]
    yield (
        "grid",
        ", ".join(f"{axis}={size}" for axis, size in zip(AXES, grid, strict=True)) + " (of the save)",
    )
    yield "seed", str(values["seed"])
    yield "saved", values["saved_at"]


def _losses(values: dict[str, Any]) -> Iterable[Row]:
    names = {"loss": "training", "validation_loss": "validation"}
    for name, (step, loss, file) in last_losses(values).items():
        number = f"{loss:.4f}" if isinstance(loss, float) else loss
        yield names[name], f"{number} at step {step:,}, by {file}"


def _data(values: dict[str, Any]) -> str:
    sources = data_sources(values)
    rows = [[source.get(key, "") for key in ("path", "weight", "fingerprint")] for source in sources]
    return "## Data\n\n" + _table(("data set", "weight", "fingerprint"), rows) if rows else ""


# -- values of the run; any may be missing, because the training loop may be the user's own ----------------------


def value_at(values: Any, *path: str) -> Any:
    """The value at a path of keys, or None.

    Example:
        >>> value_at({"config": {"optimizer": {"lr": 0.001}}}, "config", "optimizer", "lr")
        0.001
        >>> value_at({"config": "custom"}, "config", "optimizer", "lr") is None
        True
    """
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def data_sources(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The datasets of the run config, each with the fingerprint of the data that was read."""
    named = value_at(values, "config", "data", "sources")
    named = [s for s in named if isinstance(s, dict)] if isinstance(named, list) else []
    fingerprints = value_at(values, "data", "sources")
    if not isinstance(fingerprints, list) or len(fingerprints) != len(named):
        return named
    return [{**source, "fingerprint": f} for source, f in zip(named, fingerprints, strict=True)]


def last_losses(values: dict[str, Any]) -> dict[str, tuple[int, float, Path]]:
    """The last ``loss`` and ``validation_loss`` up to the checkpoint's step: (step, value, file)."""
    folder = value_at(values, "config", "logging", "folder")
    if not isinstance(folder, str) or not (file := Path(folder) / METRICS).is_file():
        return {}
    found: dict[str, tuple[int, float, Path]] = {}
    for line in read_metrics(Path(folder)):
        step = int(line["step"])
        if step <= values["step"]:
            found |= {n: (step, line[n], file) for n in ("loss", "validation_loss") if n in line}
    return found


# -- formatting --------------------------------------------------------------------------------------------------


def _given(table: Any, *wanted: tuple[str, ...]) -> Iterable[Row]:
    """Each fact under the first of its names that the table has."""
    for title, *names in wanted:
        found = [value for name in names if (value := value_at(table, name)) is not None]
        if found:
            yield title, _plain(found[0])


def _settings(config: Any, section: str, *names: str) -> Iterable[Row]:
    found = [(name, value) for name in names if (value := value_at(config, section, name)) is not None]
    if found:
        yield section, ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in found)


def _section(title: str, rows: Iterable[Row]) -> str:
    listed = list(rows)
    return f"## {title}\n\n" + _table(("", ""), listed) if listed else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return " and ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def _cell(value: Any) -> str:
    """On one line, with Markdown's special characters escaped: a path may contain them."""
    text = " ".join(_plain(value).split())
    return "".join(f"\\{c}" if c in "\\|`*_<[" else c for c in text)
