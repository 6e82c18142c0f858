"""One promise: what was done, what came of it, the bar, and what others show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table; ``others`` is the figure that the field's best or the bare engine shows, with its source."""

    what: str
    figure: str
    bar: str
    holds: bool
    others: str = ""


def all_right(what: str, tried: int, wrong: Sequence[str], others: str) -> Row:
    """Every trial has to end well; the first that did not is shown."""
    figure = f"{tried - len(wrong)}/{tried}" + (f", not {wrong[0]}" if wrong else "")
    return Row(what, figure, "all", tried > 0 and not wrong, others)


# A part yields its rows as they are known; with True it is the small version, which the tests run. One that takes
# ``broken`` can switch off what protects.
Part = Callable[..., Iterator[Row]]
