"""Blocks that are alike need not be traced one by one: two shallow copies of the model are enough.

A deep model's step is made from those of two shallow ones: what one more period of blocks adds, added as often as it takes.
Two traces, of n blocks and of one period more, differ in each phase by a run of events: the second is the first with
that run inserted. Repeated, the run gives the step of any depth. What belongs to no block, but to all of them (the norm of
the gradients, the collective of all small weights), has the same events in both, with sizes that grow by the same amount
for each period.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

from torch import nn

from fourfold.dry_run.events import CATEGORIES, Category, Event, Operation, Start, Trace

_LONGEST_PERIOD = 8
# Blocks at either end of a step differ from those in the middle: the first weight has nothing to overlap with, and
# gradients of two blocks may be in flight. These are enough for a middle, counted in periods.
_PERIODS = 3


@dataclass(frozen=True)
class Repeated:
    """A list of blocks in which each is like the one ``period`` before it."""

    name: str
    length: int
    period: int

    @property
    def traced(self) -> int:
        return self.enough_of(self.length)

    def enough_of(self, blocks: int) -> int:
        """How many of these blocks show all that there is to see: this many, and with one period more."""
        return blocks % self.period + _PERIODS * self.period


def find_repeated(model: nn.Module) -> Repeated | None:
    """The longest list of like blocks, if it is longer than what has to be traced of it."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        kinds = [_kind_of(block) for block in module]
        for period in range(1, _LONGEST_PERIOD + 1):
            if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
                repeated = Repeated(name, len(kinds), period)
                if repeated.traced + period < len(kinds):
                    found.append(repeated)
                break
    return max(found, key=lambda repeated: repeated.length, default=None)


def shallow_copy(model: nn.Module, repeated: Repeated, blocks: int) -> nn.Module:
    """A copy of the model with only the first ``blocks`` of its like blocks."""
    whole = model.get_submodule(repeated.name)
    assert isinstance(whole, nn.ModuleList)
    copies: dict[int, Any] = {}
    copies[id(whole)] = copy.deepcopy(whole[:blocks], copies)
    return copy.deepcopy(model, copies)


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    """What decides which operations a block does: its classes, the shapes of its parameters, its settings."""
    kind: list[Any] = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and key not in ("layer_idx", "layer_id")
        }
        shapes = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
        kind.append((name, type(module), sorted(settings.items(), key=str), sorted(shapes.items())))
    return tuple(map(str, kind))


# -- expansion --------------------------------------------------------------------------------------------------------

Changes = list[tuple[Category, float]]
_Item = tuple[Event, Changes]


class NotPeriodic(Exception):
    """The two traces differ by more than a run of events in each phase."""


def expand(fewer: Trace, more: Trace, repeated: Repeated, periods: int) -> Trace:
    """The trace with that many periods of blocks more than ``fewer``; ``more`` has one period more."""
    part = re.compile(rf"(^|\.){re.escape(repeated.name)}\.(\d+)")
    items: list[_Item] = []
    phases, phases_more = _by_phase(fewer), _by_phase(more)
    if [name for name, _ in phases] != [name for name, _ in phases_more]:
        raise NotPeriodic("phases")
    for (name, short), (_, long) in zip(phases, phases_more, strict=True):
        shifts = [repeated.period * turn for turn in range(periods)]
        items += _expand_phase(short, long, part, shifts[::-1] if name == "backward" else shifts)
    before = {
        c: _grown(fewer.before.get(c, 0), more.before.get(c, 0), periods)
        for c in CATEGORIES
        if fewer.before.get(c, 0) or more.before.get(c, 0)
    }
    last = _grow_changes(list(fewer.changes[-1]), list(more.changes[-1]), periods)
    return Trace([event for event, _ in items], [*(changes for _, changes in items), last], before)


def _by_phase(trace: Trace) -> list[tuple[str, list[_Item]]]:
    """Recomputation runs inside backward and belongs to it."""
    items = list(zip(trace.events, map(list, trace.changes[:-1]), strict=True))

    def phase(item: _Item) -> str:
        return "backward" if item[0].phase == "recompute" else item[0].phase

    return [(name, list(of_phase)) for name, of_phase in groupby(items, phase)]


def _expand_phase(
    short: list[_Item], long: list[_Item], part: re.Pattern[str], shifts: list[int]
) -> list[_Item]:
    """``shifts``: by how many blocks each repetition of a run moves on."""
    out: list[_Item] = []
    at = at_long = 0
    for same, extra in _runs(*_keys([e for e, _ in short], [e for e, _ in long], part)):
        out += [_grow(short[at + i], long[at_long + i], len(shifts), part) for i in range(same)]
        at, at_long = at + same, at_long + same
        run = long[at_long : at_long + extra]
        for shift in shifts:
            out += [(_moved(event, part, shift), changes) for event, changes in run]
        at_long += extra
    return out


def _runs(short: list[tuple[Any, ...]], long: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """(events that are the same, events that only the longer has after them), from one end to the other."""
    extra = len(long) - len(short)
    same = 0
    while same < len(short) and short[same] == long[same]:
        same += 1
    if extra >= 0 and short[same:] == long[same + extra :]:
        return [(same, extra), (len(short) - same, 0)]
    # Several runs: the tensors of a list in several groups, one after the other.
    runs: list[tuple[int, int]] = []
    same = 0
    for kind, i, j, k, m in SequenceMatcher(None, short, long, autojunk=False).get_opcodes():
        if kind == "equal":
            same = j - i
        elif kind == "insert":
            runs.append((same, m - k))
            same = 0
        else:
            raise NotPeriodic(f"{kind} of events {i} to {j} of {len(short)}")
    return [*runs, (same, 0)]


def _keys(
    short: list[Event], long: list[Event], part: re.Pattern[str]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """What makes an event of one trace the same as one of the other.

    The size tells two of a kind in one module apart, unless it is one that grows with the number of blocks.
    """
    keys = [_key(e, part) for e in short], [_key(e, part) for e in long]
    fixed = set(keys[0]) & set(keys[1])
    first, second = ([key if key in fixed else key[:-1] for key in of_trace] for of_trace in keys)
    return first, second


def _key(event: Event, part: re.Pattern[str]) -> tuple[Any, ...]:
    module = part.sub("", event.module)
    if isinstance(event, Operation):
        return ("operation", event.phase, event.name, module, (event.shape, event.bytes_moved))
    size = event.payload_bytes if isinstance(event, Start) else None
    return (type(event).__name__, event.phase, event.axis, event.kind, event.purpose, module, size)


def _grow(short: _Item, long: _Item, periods: int, part: re.Pattern[str]) -> _Item:
    # What is in a later block of the longer trace moves on by as many blocks for every period.
    shift = (_block(long[0], part) - _block(short[0], part)) * periods
    event, other = _moved(short[0], part, shift), long[0]
    if isinstance(event, Operation) and isinstance(other, Operation):
        event = replace(
            event,
            flops=_grown(event.flops, other.flops, periods),
            bytes_moved=_grown(event.bytes_moved, other.bytes_moved, periods),
            shape=tuple(a + (b - a) * periods for a, b in zip(event.shape, other.shape, strict=True)),
        )
    elif isinstance(event, Start) and isinstance(other, Start):
        event = replace(event, payload_bytes=_grown(event.payload_bytes, other.payload_bytes, periods))
    return event, _grow_changes(short[1], long[1], periods)


def _grow_changes(short: Changes, long: Changes, periods: int) -> Changes:
    if [c for c, _ in short] == [c for c, _ in long]:
        return [(c, _grown(a, b, periods)) for (c, a), (_, b) in zip(short, long, strict=True)]
    # Another number of tensors (an optimizer's, one for each parameter): what all of them take, then what they give back.
    out: Changes = []
    for sign in (1, -1):
        for category in CATEGORIES:
            a = sum(size for c, size in short if c == category and size * sign > 0)
            b = sum(size for c, size in long if c == category and size * sign > 0)
            if a or b:
                out.append((category, _grown(a, b, periods)))
    return out


def _grown(short: float, long: float, periods: int) -> float:
    return short + (long - short) * periods


def _block(event: Event, part: re.Pattern[str]) -> int:
    found = part.search(event.module)
    return int(found[2]) if found else 0


def _moved(event: Event, part: re.Pattern[str], shift: int) -> Event:
    if not shift or not part.search(event.module):
        return event
    module = part.sub(lambda m: m[0][: m.start(2) - m.start()] + str(int(m[2]) + shift), event.module)
    return replace(event, module=module)
