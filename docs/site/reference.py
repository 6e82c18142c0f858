"""The pages of docs/reference that the code can say for itself: commands, run config, Python. write.py writes them."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel

import fourfold as ff
from fourfold.config.describe import reference
from fourfold.config.schema import RunConfig

GENERATED = "<!-- Written by docs/site/write.py. Change the code, and run `make reference`. -->"


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs/."""
    return {
        "reference/commands.md": commands_page(),
        "reference/run-config.md": run_config_page(),
        "reference/run-config.schema.json": json.dumps(RunConfig.model_json_schema(), indent=2) + "\n",
        "reference/python.md": python_page(),
        "reference/trainer-arguments.md": trainer_arguments_page(),
    }


# -- the run config ---------------------------------------------------------------------------------------------------

RUN_CONFIG = """# Run config

`fourfold train` reads one TOML file. `fourfold init run.toml` writes one with every field. `fourfold config run.toml` checks a file and
shows all of its values; `--set section.field=value` changes a field for one start. Where a field can be none, write `"none"` (`--set optimizer.grad_clip_norm=none`). Editors can use the
[JSON Schema](run-config.schema.json), which `fourfold config --schema` prints.
"""


def run_config_page() -> str:
    return f"{GENERATED}\n{RUN_CONFIG}{reference().split(chr(10), 1)[1]}"


# -- the arguments of trainers ------------------------------------------------------------------------------------------

TRAINER_ARGUMENTS = """# Trainer arguments

What each field of `transformers.TrainingArguments`, and of TRL's `SFTConfig` and `DPOConfig`, means for a trainer [on a grid](../how-to/hugging-face.md). A field that is
refused with a value other than its default raises an `UnsupportedError` with these words before anything is loaded.
"""


def trainer_arguments_page() -> str:
    from fourfold.integrations.hf.arguments import DPO_FIELDS, FIELDS

    others = f"## DPOConfig\n\nFields that `DPOTrainer` has beside these, or means something else by.\n\n{_fields(DPO_FIELDS)}"
    return f"{GENERATED}\n{TRAINER_ARGUMENTS}\n{_fields(FIELDS)}\n\n{others}\n"


def _fields(fields: dict[str, Any]) -> str:
    changed = [
        f"| `{name}` | {field.verdict} | {field.words} |" for name, field in fields.items() if field.words
    ]
    works = ", ".join(f"`{name}`" for name, field in fields.items() if not field.words)
    table = "\n".join(["| field | | |", "|---|---|---|", *changed])
    return f"{table}\n\nThese work as they do without a grid: {works}."


# -- the commands -----------------------------------------------------------------------------------------------------

COMMANDS = """# Commands

What `--help` says about each command. If a command fails, the line that begins with `fourfold:` says what to change, and its
[exit code](../troubleshooting.md#exit-codes) is not 0.
"""


def commands_page() -> str:
    lines = [GENERATED, COMMANDS]
    for name, parser in leaves(parser_of_fourfold(), "fourfold"):
        formatter = argparse.HelpFormatter(name)
        lines += [f"## {name}", ""]
        lines += [parser.description, ""] if parser.description else []
        lines += ["```text", f"usage: {usage(name, parser)}", "```", ""]
        rows = [row for action in parser._actions if (row := _row(formatter, action))]
        if rows:
            lines += ["| argument | what it does |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def usage(name: str, parser: argparse.ArgumentParser) -> str:
    """One line, which is the same with every version of Python."""
    words = [name]
    for action in parser._get_positional_actions():
        word = str(action.metavar or action.dest).upper()
        words.append({"?": f"[{word}]", "+": f"{word} [{word} ...]"}.get(str(action.nargs), word))
    words += [
        f"{action.option_strings[-1]} {action.metavar or action.dest.upper()}"
        for action in parser._get_optional_actions()
        if action.required
    ]
    return " ".join([*words, "[options]"])


def _row(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
        return ""
    words = formatter._format_action_invocation(action)
    said = formatter._expand_help(action) if action.help else ""
    cells = (f"`{words}`", re.sub(r"<(?=\w)", "&lt;", said))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def leaves(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command; a command that has commands of its own is replaced by these."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, sub in action.choices.items():
            yield from leaves(sub, f"{name} {word}")


def parser_of_fourfold() -> argparse.ArgumentParser:
    from fourfold.cli.main import main

    return parser_of(main)


def parser_of(main: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """The parser that a program makes, caught when it is about to parse."""

    class Caught(Exception):
        pass

    def catch(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise Caught(parser)

    with patch.object(argparse.ArgumentParser, "parse_args", catch):
        try:
            main([])
        except Caught as caught:
            found: argparse.ArgumentParser = caught.args[0]
            return found
    raise ValueError(f"{main.__module__} parses no arguments")


# -- Python -----------------------------------------------------------------------------------------------------------

PYTHON = """# Python

`import fourfold as ff` has these names. The tests run each example.
"""
SECTIONS = {
    "The grid": ("Grid", "factorisations"),
    "A parallel model": ("parallelize", "Report", "UnsupportedError", "Overlap", "Lora", "full_parameters"),
    "A training step": (
        "cut_sequences",
        "cross_entropy",
        "count_labels",
        "full_logits",
        "token_log_probs",
        "no_sync",
        "clip_grad_norm_",
        "sharded_optimizer",
        "seed_ranks",
    ),
    "A run": (
        "load_run",
        "RunConfig",
        "Trainer",
        "Callback",
        "StepResult",
        "Checkpoints",
        "TrainState",
    ),
    "Where the time goes": ("measure_step", "StepReport", "save_run", "timeline"),
    "Before a run": ("plan", "Plan", "dryrun", "DryRun"),
}


def python_page() -> str:
    shown = [name for names in SECTIONS.values() for name in names]
    if sorted(shown) != sorted(ff.__all__):
        raise ValueError(f"SECTIONS and fourfold.__all__ differ in {sorted({*shown} ^ {*ff.__all__})}")
    lines = [GENERATED, PYTHON]
    for heading, names in SECTIONS.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += _of_class(name) if inspect.isclass(getattr(ff, name)) else _of_function(name)
    return "\n".join(lines).rstrip() + "\n"


def _of_function(name: str) -> list[str]:
    function = getattr(ff, name)
    return [f"### ff.{name}", "", *_signature(f"ff.{name}", function), *_docstring(function.__doc__)]


def _of_class(name: str) -> list[str]:
    kind = getattr(ff, name)
    lines = [f"### ff.{name}", ""]
    if issubclass(kind, BaseModel):
        return [*lines, f"{kind.__doc__} [Run config](run-config.md) lists its fields.", ""]
    if "__init__" in vars(kind) and not dataclasses.is_dataclass(kind):
        lines += _signature(f"ff.{name}", kind)
    lines += _docstring(kind.__doc__)
    if dataclasses.is_dataclass(kind):
        fields = [f"{f.name}: {_words(f.type)}" for f in dataclasses.fields(kind) if f.name[0] != "_"]
        lines += ["```text", *fields, "```", ""]
    for method, member in vars(kind).items():
        function = getattr(member, "__func__", member.fget if isinstance(member, property) else member)
        if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        lines += [f"#### {name}.{method}", ""]
        if not isinstance(member, property):
            lines += _signature(method, function)
        lines += _docstring(function.__doc__)
    return lines


def _signature(name: str, function: Any) -> list[str]:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    words = [_parameter(p) for p in parameters]
    if any(p.kind is p.KEYWORD_ONLY for p in parameters):
        first = next(i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY)
        if all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            words.insert(first, "*")
    returned = signature.return_annotation
    end = "" if returned is signature.empty or inspect.isclass(function) else f" -> {_words(returned)}"
    line = f"{name}({', '.join(words)}){end}"
    if len(line) > 96:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"
    return ["```text", line, "```", ""]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {_words(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{kind}{default}"


def _words(annotation: Any) -> str:
    """An annotation as it is written in the code."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _docstring(text: str | None) -> list[str]:
    """A docstring as Markdown: arguments as a list, examples as code."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(text or "").splitlines():
        if line in ("Args:", "Example:", "Attributes:"):
            section = line
            lines += ["```pycon"] if section == "Example:" else []
            continue
        if section and line and not line.startswith(" "):
            lines += ["```", ""] if section == "Example:" else []
            section = ""
        if section == "Example:":
            lines.append(line.removeprefix("    "))
        elif section and (found := re.match(r"    (\w+): (.*)", line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif section:
            lines.append(f"  {line.strip()}".rstrip())
        else:
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    lines += ["```"] if section == "Example:" else []
    # Two backticks are those of reStructuredText; a comment for doctest is not for readers.
    lines = [re.sub(r" *# doctest: \S+$", "", line) for line in lines]
    return [re.sub(r"``([^`]+)``", r"`\1`", line) for line in lines] + [""]
