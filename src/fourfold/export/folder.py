"""Exports a verified checkpoint: weights, configs, tokenizer and model card, written atomically."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from fourfold.checkpoint import commit
from fourfold.checkpoint.commit import step_name, step_of
from fourfold.checkpoint.folder import Folder, open_folder
from fourfold.checkpoint.manifest import CorruptCheckpointError, dump_json, find_damage, read_json
from fourfold.checkpoint.state import VALUES
from fourfold.checkpoint.storage import Reader
from fourfold.data.tokenizer import tokenizer_info
from fourfold.export import tokenizer as tokenizers
from fourfold.export.model_card import data_sources, model_card, value_at
from fourfold.export.weights import FILE_BYTES, write_weights
from fourfold.hf.hub_format import stock_model_of
from fourfold.parallel.lora import CONFIG as ADAPTER_CONFIG
from fourfold.untrusted_input import find_model_config

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"


@dataclass(frozen=True)
class Exported:
    """What was written, for which step, and notes for the user."""

    step: int
    files: tuple[str, ...]
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Export a checkpoint, or the newest valid one in a run's folder, to the Hugging Face folder ``out``; of LoRA, to PEFT's.

    Every file of the checkpoint is hashed first. ``dtype`` casts the weights; ``tokenizer`` is a folder or a hub id, by
    default that of the run's first dataset. Memory use is a few blocks of a file.

    Example:
        >>> export("runs/one", "exported", dtype=torch.bfloat16)  # doctest: +SKIP
    """
    root, step, notes = _choose(checkpoint, step)
    reader = Reader(root, step)
    values = read_json(reader.folder, VALUES)
    parent, name = _split(out)
    unfinished = commit.unfinished_name(parent, name)
    for taken in dict.fromkeys((name, unfinished)):
        if taken in parent.names():
            left = " (left by an export that was killed)" if taken != name else ""
            raise FileExistsError(
                f"{parent}/{taken} exists{left}, and nothing is overwritten; move it away, or export elsewhere"
            )
    chosen, said = tokenizers.find(tokenizer, data_sources(values), value_at(values, "model", "vocab_size"))
    notes += said
    folder = parent.child(unfinished)
    folder.make()
    try:
        adapter = values.get("adapter")
        stock = stock_model_of(values["model"]) if adapter is None and values["model"] is not None else None
        weights = write_weights(
            reader, folder, dtype=dtype, file_bytes=file_bytes, of_adapters=adapter is not None, stock=stock
        )
        files = list(weights.files)
        if chosen is not None:
            files += tokenizers.write(chosen, folder)
        if adapter is not None:
            files.append(ADAPTER_CONFIG)
            folder.write(ADAPTER_CONFIG, [dump_json(adapter)])
            if parent.renames:
                parent.rename(unfinished, name)
            notes.append(
                f"adapters for {adapter.get('base_model_name_or_path') or 'the model'}: PEFT loads them, and merges them"
            )
            return Exported(step, tuple(files), weights.parameters, weights.bytes, tuple(notes))
        if values["model"] is not None and (generation := _generation(values, chosen, notes)):
            files.append(GENERATION)
            folder.write(GENERATION, [dump_json(generation)])
        loader = "AutoTokenizer"
        model = values["model"]
        if chosen is not None and model is not None and (why := tokenizers.why_not_auto(chosen, model)):
            notes.append(why)
            loader = "PreTrainedTokenizerFast"
        fingerprint = tokenizer_info(chosen).fingerprint if chosen is not None else None
        card = model_card(values, weights, fingerprint, loader)
        files.append(CARD)
        folder.write(CARD, [card.encode()])
        # Last: where folders cannot be renamed, from_pretrained loads no folder without it.
        if values["model"] is not None:
            files.append(CONFIG)
            config = for_transformers_4(_with_dtype(values["model"], weights.dtype))
            config.pop("use_cache", None)  # off for training alone
            if chosen is not None and _is_random_init(values):
                config |= tokenizers.special_ids(chosen)
            folder.write(CONFIG, [dump_json(config)])
        else:
            notes.append(
                "no config.json: the model is not a Hugging Face model, so from_pretrained cannot load it"
            )
        if parent.renames:
            parent.rename(unfinished, name)
    except BaseException:
        parent.remove(unfinished)
        raise
    return Exported(step, tuple(files), weights.parameters, weights.bytes, tuple(notes))


# -- source and destination --------------------------------------------------------------------------------------------


def _choose(where: str | os.PathLike[str], step: int | None) -> tuple[Folder, int, list[str]]:
    """The folder of the run's checkpoints, the step of the newest valid one, and notes on those that were skipped."""
    folder, last = os.path.split(os.fspath(where).rstrip("/"))
    named = step_of(last)
    root = open_folder(where)
    if named is not None and not commit.steps(root):
        if step not in (None, named):
            raise ValueError(
                f"{where} is {step_name(named)}, but step {step} is asked for; give the run's folder"
            )
        root, step = open_folder(folder or "."), named
    candidates = commit.select(root, commit.steps(root), step)
    found, damaged = commit.newest_valid(candidates, lambda s: find_damage(root.child(step_name(s)), s))
    notes = [f"damaged, and not exported: {line}" for lines in damaged.values() for line in lines]
    if found is None:
        raise CorruptCheckpointError(
            "\n".join([f"none of the {len(damaged)} checkpoints checked is valid", *notes])
        )
    return root, found, notes


def for_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the fields of rotary positions that transformers 4 knows, and servers that are built on it.

    They ignore ``rope_parameters`` without an error, and take a base of 10,000. Positions by kind of layer have no such fields.

    Example:
        >>> for_transformers_4({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})["rope_theta"]
        500000.0
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    known = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope.get("rope_type", "default") != "default":
        known["rope_scaling"] = rope
    return config | known


def _split(out: str | os.PathLike[str]) -> tuple[Folder, str]:
    folder, name = os.path.split(os.fspath(out).rstrip("/"))
    if name in ("", ".", "..") or name.endswith(":") or folder.endswith(":/"):
        raise ValueError(
            f"{os.fspath(out)!r} does not name a folder to create; give one that does not exist yet"
        )
    return open_folder(folder or "."), name


# -- configurations ------------------------------------------------------------------------------------------------------


def _with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with this dtype, which from_pretrained casts to, also in the configs of submodels."""
    named = {key: _with_dtype(v, dtype) if _is_config(v) else v for key, v in config.items()}
    named.pop("torch_dtype", None)  # its name before transformers 5
    return named | {"dtype": str(dtype).removeprefix("torch.")}


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _is_random_init(values: dict[str, Any]) -> bool:
    """Did `fourfold train` begin without pretrained weights? Then the tokenizer of the data has the special token ids."""
    return value_at(values, "config", "model", "config") is not None


def _generation(values: dict[str, Any], tokenizer: Any, notes: list[str]) -> dict[str, Any]:
    """The generation config of the pretrained model if there is one, otherwise the special token ids."""
    pretrained = value_at(values, "config", "model", "pretrained")
    if isinstance(pretrained, str):
        try:
            folder = find_model_config(pretrained).parent
        except ValueError:
            notes.append(f"{pretrained} is not here: copy its {GENERATION}, if it has one, into the folder")
        else:
            if (folder / GENERATION).is_file():
                return read_json(open_folder(folder), GENERATION)
    names = tokenizers.SPECIAL_IDS
    ids = {name: id_ for name in names if (id_ := value_at(values, "model", name)) is not None}
    own = tokenizers.special_ids(tokenizer) if tokenizer is not None else {}
    return ids | own if _is_random_init(values) else own | ids
