"""Checks of untrusted input: regular files, bounded and valid JSON, names that stay in their folder, models without code."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

MAX_JSON_BYTES = 100_000_000
MAX_LAYERS = 10_000
MAX_SIZE = 1 << 40  # of any integer in a model's configuration; no dim of a model is near it


def open_file(path: Path) -> int:
    """Open a regular file for reading; a pipe or a device, which might never end, is an error."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file, but a folder, a pipe or a device")
    return descriptor


def read_json(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file; a ValueError that names the file if there is none."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise ValueError(f"{path} has {size} bytes, more than the limit of {limit_bytes}")
        text = file.read(size)
    return parse_json(text, path)


def parse_json(text: bytes, where: object) -> dict[str, Any]:
    """The JSON object in a text; a ValueError that names ``where`` if there is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where} is JSON of type {type(values).__name__} instead of an object")
    return values


def plain_name(name: Any) -> str:
    """A file name without any folder in it."""
    if not isinstance(name, str) or not name or name.startswith(".") or set(name) & set("/\\:\0"):
        raise ValueError(f"{name!r:.80} is not the plain name of a file")
    return name


def relative_name(name: Any) -> str:
    """A name of a file below a folder, never outside it.

    Example:
        >>> relative_name("train/000000-000")
        'train/000000-000'
        >>> relative_name("../secrets")
        Traceback (most recent call last):
        ValueError: '../secrets' is not the name of a file below its folder
    """
    try:
        return "/".join(plain_name(part) for part in name.split("/"))
    except (ValueError, AttributeError):
        raise ValueError(f"{name!r:.80} is not the name of a file below its folder") from None


def natural(value: Any, limit: int = 1 << 62) -> int:
    """An integer from 0 to ``limit``; a bool or a float is an error."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.80} is not an integer from 0 to {limit}")
    return value


Natural = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]  # of a pydantic dataclass


def word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is not a string")
    return value


def find_model_config(where: str | Path) -> Path:
    """The config.json of a model: the file itself, one in a folder, or that of a hub id."""
    path = Path(where)
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    if path.exists() or path.suffix == ".json" or path.is_absolute() or str(where).startswith("."):
        raise ValueError(f"there is no config.json at {where}; give its path, a folder with one, or a hub id")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(where), "config.json"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{where} is neither a folder with a config.json nor a hub id that can be reached; for a gated model set HF_TOKEN "
            f"({_first_line(error)})"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def load_model_config(where: str | Path) -> Any:
    """The Hugging Face configuration of a file, a folder or a hub id. Code that comes with it is never run."""
    from transformers import AutoConfig

    try:
        # None, the default, asks at the terminal.
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # each family has its own validators and errors
        raise ValueError(f"{where} is not a valid configuration: {error}") from error
    attention = getattr(config, "_attn_implementation", None)
    if "/" in str(attention):
        raise ValueError(
            f"{where} asks for the attention of {attention}, which is code from the hub; remove attn_implementation from it"
        )
    sizes = config.to_dict()
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        if isinstance(sizes.get(name), int) and sizes[name] > MAX_LAYERS:
            raise ValueError(f"{where} has {name}={sizes[name]}, more than the limit of {MAX_LAYERS}")
    for name, size in sizes.items():
        if isinstance(size, int) and size > MAX_SIZE:
            raise ValueError(f"{where} has {name}={size}, more than the limit of {MAX_SIZE}")
    return config
