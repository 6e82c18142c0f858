"""Blocks that are alike need not be traced one by one: two shallow copies of the model are enough.

A deep model's step is made from those of two shallow ones: what one more period of blocks adds, added as often as it takes.
Two traces, of n blocks and of one period more, differ in each phase by a run of events: the second is the first with
that run inserted. Repeated, the run gives the step of any depth. What belongs to no block, but to all of them (the norm of
the gradients, the collective of all small weights), has the same events in both, with sizes that grow by the same amount
for each period. Blocks that are recomputed in two ways are two lists, one after the other, each with a longer copy of its own.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Sequence
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

    def enough_of(self, blocks: int, lists: int = 1) -> int:
        """How many of these blocks show all that there is to see: this many, and with one period more.

        Of two lists each has one end of the step.
        """
        return blocks % self.period + (_PERIODS if lists == 1 else _PERIODS - 1) * self.period


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


def expand(fewer: Trace, more: Sequence[Trace], repeated: Repeated, periods: Sequence[int]) -> Trace:
    """``fewer`` with so many more periods of the blocks of each list; each of ``more`` has one period of a list more."""
    part = re.compile(rf"(^|\.){re.escape(repeated.name)}\.(\d+)")
    items: list[_Item] = []
    phases, phases_more = _by_phase(fewer), [_by_phase(trace) for trace in more]
    names = [name for name, _ in phases]
    if any([name for name, _ in other] != names for other in phases_more):
        raise NotPeriodic("phases")
    # By how many blocks each repetition of a list's period moves on: also over those of the lists before it.
    shifts, first = [], 0
    for count in periods:
        shifts.append([first + repeated.period * turn for turn in range(count)])
        first += repeated.period * count
    for i, (name, short) in enumerate(phases):
        order = [turns[::-1] if name == "backward" else turns for turns in shifts]
        items += _expand_phase(short, [other[i][1] for other in phases_more], part, order)
    before = {
        c: _grown(fewer.before.get(c, 0), [trace.before.get(c, 0) for trace in more], periods)
        for c in CATEGORIES
        if any(trace.before.get(c, 0) for trace in (fewer, *more))
    }
    last = _grow_changes(list(fewer.changes[-1]), [list(trace.changes[-1]) for trace in more], periods)
    return Trace([event for event, _ in items], [*(changes for _, changes in items), last], before)


def _by_phase(trace: Trace) -> list[tuple[str, list[_Item]]]:
    """Recomputation runs inside backward and belongs to it."""
    items = list(zip(trace.events, map(list, trace.changes[:-1]), strict=True))

    def phase(item: _Item) -> str:
        return "backward" if item[0].phase == "recompute" else item[0].phase

    return [(name, list(of_phase)) for name, of_phase in groupby(items, phase)]


def _expand_phase(
    short: list[_Item], longer: list[list[_Item]], part: re.Pattern[str], shifts: list[list[int]]
) -> list[_Item]:
    """``shifts``: for each of the longer ones, by how many blocks each repetition of its run moves on."""
    periods = [len(turns) for turns in shifts]
    same: list[list[_Item]] = []  # of each longer one, what is in the shorter one as well
    runs: dict[int, list[_Item]] = defaultdict(list)  # what goes before an event of the shorter one
    for long, turns in zip(longer, shifts, strict=True):
        common: list[_Item] = []
        at = 0
        for equal, extra in _runs(*_keys([e for e, _ in short], [e for e, _ in long], part)):
            common += long[at : at + equal]
            run = long[at + equal : at + equal + extra]
            runs[len(common)] += [(_moved(e, part, shift), changes) for shift in turns for e, changes in run]
            at += equal + extra
        same.append(common)
    out: list[_Item] = []
    for i, item in enumerate(short):
        out += [*runs[i], _grow(item, [common[i] for common in same], periods, part)]
    return [*out, *runs[len(short)]]


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


def _grow(short: _Item, longer: list[_Item], periods: Sequence[int], part: re.Pattern[str]) -> _Item:
    event, others = short[0], [other for other, _ in longer]
    # What is in a later block of a longer trace moves on by as many blocks for every period.
    block = _block(event, part)
    event = _moved(
        event, part, int(_grown(block, [_block(other, part) for other in others], periods)) - block
    )
    if isinstance(event, Operation):
        operations = [other for other in others if isinstance(other, Operation)]
        sizes = zip(event.shape, *(other.shape for other in operations), strict=True)
        event = replace(
            event,
            flops=_grown(event.flops, [other.flops for other in operations], periods),
            bytes_moved=_grown(event.bytes_moved, [other.bytes_moved for other in operations], periods),
            shape=tuple(int(_grown(size, more, periods)) for size, *more in sizes),
        )
    elif isinstance(event, Start):
        sent = [other.payload_bytes for other in others if isinstance(other, Start)]
        event = replace(event, payload_bytes=_grown(event.payload_bytes, sent, periods))
    return event, _grow_changes(short[1], [changes for _, changes in longer], periods)


def _grow_changes(short: Changes, longer: list[Changes], periods: Sequence[int]) -> Changes:
    categories = [c for c, _ in short]
    if all([c for c, _ in long] == categories for long in longer):
        sizes = zip(*([size for _, size in changes] for changes in (short, *longer)), strict=True)
        return [(c, _grown(size, more, periods)) for c, (size, *more) in zip(categories, sizes, strict=True)]
    # Another number of tensors (an optimizer's, one for each parameter): what all of them take, then what they give back.
    out: Changes = []
    for sign in (1, -1):
        for category in CATEGORIES:
            size, *more = (
                sum(size for c, size in changes if c == category and size * sign > 0)
                for changes in (short, *longer)
            )
            if size or any(more):
                out.append((category, _grown(size, more, periods)))
    return out


def _grown(short: float, longer: Sequence[float], periods: Sequence[int]) -> float:
    return short + sum((long - short) * count for long, count in zip(longer, periods, strict=True))


def _block(event: Event, part: re.Pattern[str]) -> int:
    found = part.search(event.module)
    return int(found[2]) if found else 0


def _moved(event: Event, part: re.Pattern[str], shift: int) -> Event:
    if not shift or not part.search(event.module):
        return event
    module = part.sub(lambda m: m[0][: m.start(2) - m.start()] + str(int(m[2]) + shift), event.module)
    return replace(event, module=module)
