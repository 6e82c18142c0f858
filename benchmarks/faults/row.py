"""One row of the table: what was tested, the result, the threshold, and results of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One row; ``others`` is the best published result or that of PyTorch alone, with its source."""

    what: str
    result: str
    threshold: str
    holds: bool
    others: str = ""


def all_right(what: str, tried: int, wrong: Sequence[str], others: str) -> Row:
    """A row in which every trial has to succeed; it shows the first that did not."""
    result = f"{tried - len(wrong)}/{tried}" + (f", not {wrong[0]}" if wrong else "")
    return Row(what, result, "all", tried > 0 and not wrong, others)


# A part yields its rows as they are known; with True it is the small version, which the tests run. A part that takes
# ``broken`` can switch off the protection.
Part = Callable[..., Iterator[Row]]
