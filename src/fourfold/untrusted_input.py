"""What comes from outside: files that are files, JSON that is bounded and sound, names that stay in their folder, models
without code of their own."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 100_000_000
MAX_LAYERS = 10_000
MAX_SIZE = 1 << 40  # of anything in a model's configuration: no dim of a model is near it


def open_file(path: Path) -> int:
    """A descriptor to read a file by; a pipe or a device of that name, which would never end, is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no file, but a folder, a pipe or a device")
    return descriptor


def read_json(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file; a ValueError that names the file, if there is none."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise ValueError(f"{path} has {size} bytes, more than the limit of {limit_bytes}")
        text = file.read(size)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has no sound JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} has JSON of type {type(values).__name__} instead of an object")
    return values


def relative_name(name: Any) -> str:
    """A name that leads to a file below a folder, and to none beside it.

    Example:
        >>> relative_name("train/000000-000")
        'train/000000-000'
        >>> relative_name("../secrets")
        Traceback (most recent call last):
        ValueError: '../secrets' is not the name of a file below its folder
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if not all(parts) or any(part.startswith(".") for part in parts) or set(str(name)) & set("\\:\0"):
        raise ValueError(f"{name!r:.80} is not the name of a file below its folder")
    return str(name)


def natural(value: Any, limit: int = 1 << 62) -> int:
    """A whole number of at least 0, and no number that only looks like one."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.80} is not a whole number from 0 to {limit}")
    return value


def word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    return value


def load_model_config(where: str | Path) -> Any:
    """The Hugging Face configuration of a file, a folder or a hub id. Code that it brings along is never run."""
    from transformers import AutoConfig

    try:
        # None, the default, asks whoever sits at the terminal.
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # each family has validators of its own, and errors of their own
        raise ValueError(f"{where} has no sound configuration: {error}") from error
    attention = getattr(config, "_attn_implementation", None)
    if "/" in str(attention):
        raise ValueError(
            f"{where} asks for the attention of {attention}, which is code from the hub; take attn_implementation out of it"
        )
    sizes = config.to_dict()
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        if isinstance(sizes.get(name), int) and sizes[name] > MAX_LAYERS:
            raise ValueError(f"{where} has {name}={sizes[name]}, and no model has more than {MAX_LAYERS}")
    for name, size in sizes.items():
        if isinstance(size, int) and size > MAX_SIZE:
            raise ValueError(f"{where} has {name}={size}, and nothing in a model is larger than {MAX_SIZE}")
    return config
