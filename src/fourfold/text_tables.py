"""Tables as text."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: Collection[str] = ()
) -> Table:
    """A table; the first column and those under the headings ``text`` are text, the others are numbers."""
    out = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        out.add_column(heading, justify="left" if i == 0 or heading in text else "right")
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
