"""Arguments that several commands have."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fourfold.config.schema import EngineSection


def positive(text: str, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; use a whole number of at least {least}")
    return int(text)


def expert_load(text: str) -> float | Literal["worst"]:
    """A multiple of the mean, or the word ``worst``."""
    if text == "worst":
        return "worst"
    try:
        load = float(text)
    except ValueError:
        load = 0.0
    if not 1.0 <= load < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text} is not a load of experts; use a number of at least 1.0, or worst"
        )
    return load


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the run config (TOML); `fourfold init` writes one")


def add_changes(parser: argparse.ArgumentParser) -> None:
    what = "change a field of the run config, such as optimizer.lr=3e-4"
    add_repeated(parser, "--set", "SECTION.FIELD=VALUE", what)


def add_repeated(parser: argparse.ArgumentParser, option: str, metavar: str, what: str) -> None:
    """An option that can be given several times; its values are a list."""
    what = f"{what}; can be repeated"
    parser.add_argument(option, action="append", default=[], metavar=metavar, help=what)


def add_engine(parser: argparse.ArgumentParser, *names: str, unless: str = "") -> None:
    """Options for fields of [engine], with their descriptions and defaults, or what happens ``unless`` they are given."""
    for name in names:
        field = EngineSection.model_fields[name]
        kinds = get_args(field.annotation)
        choices = [choice for choice in kinds if not (unless and choice == "auto")]
        given: dict[str, Any] = {"choices": choices} if choices else {"type": field.annotation}
        if type(None) in kinds:  # a number, or nothing
            given = {"type": partial(positive, least=0)}
        about = str(field.description)
        if unless:  # that says what would be chosen
            about = re.sub("; auto: [^;.]*", "", about)
        about = f"{about[0].lower()}{about[1:].removesuffix('.')} (default: {unless or field.default})"
        if any(get_origin(kind) is list for kind in kinds):  # words, or axes
            words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
            given = {"type": partial(_words_or_axes, words), "metavar": "|".join((*words, "AXES"))}
        if field.annotation is bool or bool in kinds:
            given = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(f"--{name.replace('_', '-')}", **given, help=about)
        parser.set_defaults(**{name: None if unless else field.default})


def _words_or_axes(words: Sequence[str], text: str) -> str | list[str]:
    """One of the words, or axes separated by commas."""
    return text if text in words else text.split(",")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=positive,
        help="number of ranks on this machine, if the run config sets no grid (default: the number of GPUs, or 1 on a CPU)",
    )
