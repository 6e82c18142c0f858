"""Commands in the README and the docs: code blocks, and code in prose."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from fourfold.cli.main import main as fourfold
from fourfold.config.run_file import apply, from_dict

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)


@dataclass(frozen=True)
class Code:
    """A block, or (without a language) text between backticks in prose."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.strip()}"


def blocks(page: str, text: str | None = None) -> list[Code]:
    text = (ROOT / page).read_text() if text is None else text
    return [
        Code(page, text[: found.start()].count("\n") + 1, found[2], found[3])
        for found in FENCE.finditer(text)
    ]


def spans(page: str, text: str | None = None) -> list[Code]:
    text = (ROOT / page).read_text() if text is None else text
    prose = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    return [
        Code(page, prose[: found.start()].count("\n") + 1, "", " ".join(found[1].split()))
        for found in re.finditer(r"`([^`]+)`", prose)
    ]


def commands(block: Code) -> list[str]:
    """The commands of a block, with continued lines joined and comments removed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = (" ".join(shlex.quote(word) for word in shlex.split(line, comments=True)) for line in lines)
    return [line for line in words if line]


def site(name: str) -> ModuleType:
    """A module of docs/site, which is not a package: mkdocs loads it by its path."""
    spec = spec_from_file_location(name, ROOT / f"docs/site/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# In a shell: what a reader has who has installed the package.
INSTALLED = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT}/src",
}


def run(command: str, folder: Path, **settings: str) -> str:
    """What a shell command prints, which has to succeed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


# -- with the real parsers ------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Raised when a program has parsed its arguments."""


def parse(main: Callable[[list[str]], Any], arguments: list[str]) -> argparse.Namespace:
    """Arguments parsed by a program's own parser; a ValueError if it rejects them."""
    original = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        raise Parsed(original(parser, *args, **kwargs))

    said = StringIO()
    try:
        with (
            patch.object(argparse.ArgumentParser, "parse_args", stop),
            redirect_stderr(said),
            redirect_stdout(said),
        ):
            main(arguments)
    except Parsed as parsed:
        found: argparse.Namespace = parsed.args[0]
        return found
    except SystemExit as end:
        if end.code == 0:  # --help
            return argparse.Namespace()
        raise ValueError(said.getvalue().strip().splitlines()[-1]) from None
    raise ValueError(f"{main.__module__} does not parse arguments")


def check(command: str) -> None:
    """Raise ValueError if the project's programs do not accept this command."""
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0] == "fourfold":
        _check_fourfold(words[1:])
    elif words[0] == "torchrun":
        _check_torchrun(words[1:])
    elif words[0] == "srun":
        inner = next((i for i, word in enumerate(words) if word in ("fourfold", "python")), None)
        if inner is None:
            raise ValueError("srun starts neither fourfold nor python")
        check(" ".join(words[inner:]))
    elif words[:2] == ["python", "-m"]:
        _check_module(words[2], words[3:])
    elif words[:2] == ["python", "-c"]:
        compile(words[2], "python -c", "exec")
    elif words[0] == "python":
        _check_script(words[1])
    else:
        raise ValueError(f"{words[0]!r} is not a known program")


def _check_fourfold(arguments: list[str]) -> None:
    """Check the options, and the changes by --set."""
    values: dict[str, Any] = {"model": {"config": "a"}, "data": {"sources": [{"path": "b"}]}}
    for change in getattr(parse(fourfold, arguments), "set", []):
        apply(values, change)
    from_dict(values)


def _check_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options = parse(lambda words: get_args_parser().parse_args(words), arguments)
    if options.module:
        _check_module(options.training_script, options.training_script_args)
    else:
        _check_script(options.training_script)


def _check_module(name: str, arguments: list[str]) -> None:
    if name == "fourfold":
        _check_fourfold(arguments)
    elif name == "fourfold.launch.agent" and arguments:  # its options are torchrun's
        _check_torchrun(arguments)
    elif name.startswith(("benchmarks.", "fourfold.")) and find_spec(name):
        module = import_module(name)
        main = (module if hasattr(module, "main") else import_module(f"{name}.__main__")).main
        if arguments or name.startswith("benchmarks."):
            parse(main, arguments)
    else:
        raise ValueError(f"{name} is not a module of this project")


def _check_script(path: str) -> None:
    if not (ROOT / path).is_file():
        raise ValueError(f"there is no {path}")


def options_of_all() -> Iterator[str]:
    """Every option of all commands and benchmarks."""

    def collect(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    yield from collect(below)

    mains = [fourfold]
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        if "ArgumentParser" in path.read_text():
            mains.append(import_module(f"benchmarks.{path.stem}").main)
    for main in mains:
        yield from collect(site("reference").parser_of(main))


def is_name_of_a_command(words: list[str]) -> bool:
    """Is it a command, or an option of it, named in prose without values, such as `fourfold checkpoint ls`?"""
    parser = site("reference").parser_of(fourfold)
    options = [word for word in words if word.startswith("--")]
    for word in words[: len(words) - len(options)]:
        below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not below or word not in below[0].choices:
            return False
        parser = below[0].choices[word]
    return words[len(words) - len(options) :] == options and set(options) <= set(
        parser._option_string_actions
    )
