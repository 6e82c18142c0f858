"""Tables as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

_TEXT = ("unit", "role", "parameters", "why")


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column and those named in `_TEXT` are text, and whose others are numbers."""
    out = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        out.add_column(heading, justify="left" if i == 0 or heading in _TEXT else "right")
    for row in rows:
        out.add_row(*row)
    return out


def as_text(width: int, *parts: RenderableType) -> str:
    """Tables and paragraphs, one below the other."""
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in parts:
        console.print(part)
    return out.getvalue()
