"""One promise: what was done, what came of it, the bar, and what others show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table; ``others`` is the figure that the field's best or the bare engine shows, with its source."""

    what: str
    figure: str
    bar: str
    holds: bool
    others: str = ""


# A part yields its rows as they are known; with True it is the small version, which the tests run. One that takes
# ``broken`` can switch off what protects.
Part = Callable[..., Iterator[Row]]
