"""What mkdocs does beside turning Markdown into pages: what the code can say for itself is taken from the code."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent.parent


def on_config(config: Any) -> Any:
    """Every decision is in the navigation, by its title."""
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    entries = [{_title(path): f"decisions/{path.name}"} for path in decisions]
    for section in config.nav:
        for pages in section.values():
            if isinstance(pages, list):
                pages[:] = [{"Decisions": entries} if "Decisions" in page else page for page in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages that have no file: the run's file and its schema, the commands."""
    from mkdocs.structure.files import File

    from fourfold.config.describe import reference
    from fourfold.config.schema import RunConfig

    made = {
        "run-file.md": RUN_FILE + reference().split("\n", 1)[1],
        "run-file.schema.json": json.dumps(RunConfig.model_json_schema(), indent=2),
        "commands.md": commands_page(),
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A line that is nothing but a link to a heading of the README gives way to what stands below that heading."""
    link = r"^\[[^\]]+\]\(\.\./README\.md#([\w-]+)\)$"
    return re.sub(link, lambda found: readme_section(found[1]), markdown, flags=re.M)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Pictures go into the page itself, where its switch between light and dark reaches them."""
    return re.sub(r'<p><img alt="[^"]*" src="(?:\.\./)*pictures/(\w+)\.svg" ?/?></p>', _inline, html)


def _inline(found: re.Match[str]) -> str:
    svg = (ROOT / "docs/pictures" / f"{found[1]}.svg").read_text()
    return f'<div class="ff-figure">{svg}</div>'


def _title(path: Path) -> str:
    return path.read_text().split("\n", 1)[0].removeprefix("# ")


# -- the README -----------------------------------------------------------------------------------------------------


def readme_section(anchor: str) -> str:
    """The text below a heading of the README, its links seen from docs/."""
    parts = re.split(r"^## (.+)$", (ROOT / "README.md").read_text(), flags=re.M)
    anchors = [re.sub(r"[^\w ]", "", heading).lower().replace(" ", "-") for heading in parts[1::2]]
    sections = dict(zip(anchors, parts[2::2], strict=True))
    if anchor not in sections:
        raise KeyError(f"README.md has no heading #{anchor}; it has {', '.join(sections)}")
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", _link_from_docs, sections[anchor].strip())


def _link_from_docs(found: re.Match[str]) -> str:
    words, target = found.groups()
    if target.startswith("docs/"):
        return f"[{words}]({target.removeprefix('docs/')})"
    # A file of the repository, or another heading of the README, is no page here.
    return found[0] if target.startswith("http") else words


# -- the commands ---------------------------------------------------------------------------------------------------

RUN_FILE = """# The run's file

`fourfold train` reads one TOML file. `fourfold init run.toml` writes one with every field; `fourfold config` prints this
page, and `fourfold config run.toml` checks a file and shows all that it says. `--set section.field=value` changes a
field for one start. Editors take the [JSON Schema](run-file.schema.json), which `fourfold config --schema` prints.
"""

COMMANDS = """# Commands

What `--help` says of each. A command that fails ends with a code other than 0, and with one line on what to change.
"""


def commands_page() -> str:
    lines = [COMMANDS]
    for name, parser in leaves(parser_of_fourfold(), "fourfold"):
        formatter = argparse.HelpFormatter(name, width=86)
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        lines += [f"## {name}", "", parser.description or "", ""]
        lines += ["```text", formatter.format_help().strip(), "```", ""]
        rows = [row for action in parser._actions if (row := _row(formatter, action))]
        if rows:
            lines += ["| argument | what it does |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
        return ""
    words = formatter._format_action_invocation(action)
    said = formatter._expand_help(action) if action.help else ""
    cells = (f"`{words}`", re.sub(r"<(?=\w)", "&lt;", said))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def leaves(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command, those that have commands of their own replaced by these."""
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
