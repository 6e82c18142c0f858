"""The tokenizer of a run: that of its first dataset, or one given by the user."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fourfold.checkpoint.folder import Folder
from fourfold.data.tokenizer import load_tokenizer

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAKE_IDS = ("normalizer", "pre_tokenizer", "model")  # the parts of a tokenizer that turn text into ids
Name = str | os.PathLike[str]


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Special token ids for generation: those of the data, whatever the model's config says."""
    found = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    return {name: int(value) for name, value in found.items() if value is not None}


def write(tokenizer: Any, out: Folder) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).iterdir() if file.is_file())
        for file in files:
            out.write(file.name, [file.read_bytes()])
        return [file.name for file in files]


def why_not_auto(tokenizer: Any, config: dict[str, Any]) -> str | None:
    """Why `AutoTokenizer` does not load this tokenizer from a folder with this ``config.json``; None if it does.

    For some model types it takes the type's own class, whatever the folder says, and that class replaces how text is split.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            loaded = AutoTokenizer.from_pretrained(folder)
            if _parts(loaded) == _parts(tokenizer):
                return None
            found = f"as {type(loaded).__name__}, which gives other token ids than the run's data has"
        except (OSError, ValueError) as error:
            found = f"not at all: {str(error).splitlines()[0]}"
    return (
        f"AutoTokenizer loads the tokenizer of a {config.get('model_type')} folder {found}; load it with "
        "PreTrainedTokenizerFast.from_pretrained"
    )


def _parts(tokenizer: Any) -> list[Any]:
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return [parts[name] for name in _MAKE_IDS]


def find(named: Name | None, sources: list[dict[str, Any]], rows: Any) -> tuple[Any, list[str]]:
    """The given tokenizer, or that of the first of the datasets if it exists, or None; and notes for the user.

    ``rows`` is the size of the model's vocabulary, if it is known.
    """
    if named is None:
        if not sources:
            return None, ["no tokenizer: the checkpoint names no dataset; --tokenizer FOLDER adds one"]
        named = Path(str(sources[0].get("path"))) / "tokenizer"
        if not named.is_dir():
            return None, [f"no tokenizer: there is no {named} here; --tokenizer FOLDER adds one"]
    elif os.path.isdir(named) and not (Path(named) / "tokenizer.json").exists():
        raise ValueError(
            f"{os.fspath(named)} has no tokenizer.json; give a folder that save_pretrained wrote"
        )
    tokenizer = load_tokenizer(os.fspath(named))
    if isinstance(rows, int) and len(tokenizer) > rows:
        raise ValueError(
            f"tokenizer {os.fspath(named)} has {len(tokenizer)} tokens, the model's vocabulary has {rows}; give the "
            "tokenizer that it was trained with"
        )
    return tokenizer, []
