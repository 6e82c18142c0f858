"""Blocks that are alike need not be traced one by one: two shallow copies of the model are enough.

A deep model's step is made from those of two shallow ones: what one more period of blocks adds, added as often as it takes.
Two traces, of n blocks and of one period more, differ in each phase by a run of events: the second is the first with
that run inserted. Repeated, the run gives the step of any depth. What belongs to no block, but to all of them (the norm of
the gradients, the collective of all small weights), has the same events in both, with sizes that grow by the same amount
for each period. Blocks that are recomputed in two ways are two lists, one after the other: the longer copy has one period
more of each.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from fourfold.dry_run.events import CATEGORIES, Category, Event, Operation, Start, Trace

_LONGEST_PERIOD = 8
# Blocks at either end of a step differ from those in the middle: the first weight has nothing to overlap with, and
# weights and gradients of two blocks may be in flight in backward. So many blocks have to be before a middle one, in periods.
_BEFORE_MIDDLE = 2


@dataclass(frozen=True)
class Repeated:
    """A list of blocks in which each is like the one ``period`` before it."""

    name: str
    length: int
    period: int

    @property
    def traced(self) -> int:
        return self.enough_of(self.length)

    def enough_of(self, blocks: int, first: int = 0) -> int:
        """How many of these blocks show all that there is to see: this many, and with one period more.

        There are ``first`` blocks before them.
        """
        return blocks % self.period + self.middle(first) + self.period

    def middle(self, first: int) -> int:
        """Which of these blocks, with ``first`` before them, is like those in the middle also in backward; one of their kind is before it."""
        return max(self.period, _BEFORE_MIDDLE * self.period - first)


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
    """The two traces differ by more than a run of events for each list in each phase."""


class Growth(NamedTuple):
    """A list of blocks of which the longer trace has one period more than the shorter."""

    first: int  # its first block in the shorter trace
    first_longer: int  # and in the longer
    periods: int  # that the model has more than the shorter trace


def expand(fewer: Trace, more: Trace, repeated: Repeated, growths: Sequence[Growth]) -> Trace:
    """``fewer`` with as many more periods of each list as the model has."""
    return _Expansion(repeated, growths).trace(fewer, more)


class _Expansion:
    def __init__(self, repeated: Repeated, growths: Sequence[Growth]) -> None:
        self._part = re.compile(rf"(^|\.){re.escape(repeated.name)}\.(\d+)")
        self._repeated, self._period, self._growths = repeated, repeated.period, growths
        self._periods = sum(growth.periods for growth in growths)
        self._block_of: dict[str, int | None] = {}  # by module
        self._moved_modules: dict[tuple[str, int], str] = {}  # by module and how many blocks it moves on

    def trace(self, fewer: Trace, more: Trace) -> Trace:
        phases, phases_more = _by_phase(fewer), _by_phase(more)
        if [name for name, _ in phases] != [name for name, _ in phases_more]:
            raise NotPeriodic("phases")
        items: list[_Item] = []
        for (name, short), (_, long) in zip(phases, phases_more, strict=True):
            items += self._expand_phase(short, long, is_backward=name == "backward")
        before = {
            c: self._grown(fewer.before.get(c, 0), more.before.get(c, 0))
            for c in CATEGORIES
            if fewer.before.get(c, 0) or more.before.get(c, 0)
        }
        last = self._grow_changes(list(fewer.changes[-1]), list(more.changes[-1]))
        return Trace([event for event, _ in items], [*(changes for _, changes in items), last], before)

    def _expand_phase(self, short: list[_Item], long: list[_Item], *, is_backward: bool) -> list[_Item]:
        """The events up to a period in the middle of a list, this period as often as the model has it, and so on."""
        out: list[_Item] = []
        i = j = 0  # in the shorter and in the longer trace
        for at, begin, end, shifts in self._middles(short, long, is_backward=is_backward):
            if not (i <= at and j <= begin < end):
                raise NotPeriodic("blocks that do nothing, or not one after another")
            out += self._expand_rest(short[i:at], long[j:begin])
            out += [(self._moved(e, shift), changes) for shift in shifts for e, changes in long[begin:end]]
            i, j = at, end
        return [*out, *self._expand_rest(short[i:], long[j:])]

    def _middles(
        self, short: list[_Item], long: list[_Item], *, is_backward: bool
    ) -> list[tuple[int, int, int, Sequence[int]]]:
        """Of each list: where in the shorter trace, from and to where in the longer, by how many blocks each repetition moves on."""
        starts, starts_longer = self._starts(short), self._starts(long)
        if not starts_longer:
            return []  # of no block, as the optimizer's step
        found: list[tuple[int, int, int, Sequence[int]]] = []
        left_out = 0  # blocks of earlier lists
        for first, first_longer, periods in self._growths:
            middle = self._repeated.middle(first)
            after = middle + self._period
            blocks = (middle - 1, after - 1, middle - 1) if is_backward else (middle, middle, after)
            at = starts.get(first + blocks[0], -1)
            begin, end = (starts_longer.get(first_longer + block, -1) for block in blocks[1:])
            shifts = range(left_out, left_out + self._period * periods, self._period)
            found.append((at, begin, end, shifts[::-1] if is_backward else shifts))
            left_out += self._period * (periods - 1)
        return found[::-1] if is_backward else found

    def _starts(self, items: list[_Item]) -> dict[int, int]:
        """The first operation of each block."""
        starts: dict[int, int] = {}
        for i, (event, _) in enumerate(items):
            if isinstance(event, Operation) and (block := self._block(event)) is not None:
                starts.setdefault(block, i)
        return starts

    def _expand_rest(self, short: list[_Item], long: list[_Item]) -> list[_Item]:
        """What both traces have, and what each period adds to it without saying whose it is, as to the optimizer's step."""
        out: list[_Item] = []
        i = j = 0
        lists = len(self._growths)
        for equal, extra in _differences(*self._keys([e for e, _ in short], [e for e, _ in long])):
            both = zip(short[i : i + equal], long[j : j + equal], strict=True)
            out += [self._grow(of_short, of_long) for of_short, of_long in both]
            i, j = i + equal, j + equal
            if extra % lists:
                raise NotPeriodic(f"{extra} events more of {lists} lists of like blocks")
            period = long[j : j + extra // lists]
            for turn in range(self._periods):
                out += [(self._moved(e, self._period * turn), changes) for e, changes in period]
            j += extra
        return out

    def _keys(
        self, short: list[Event], long: list[Event]
    ) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """What makes an event of one trace the same as one of the other.

        The size tells two of a kind in one module apart, unless it is one that grows with the number of blocks.
        """
        keys = [self._key(e) for e in short], [self._key(e) for e in long]
        fixed = set(keys[0]) & set(keys[1])
        first, second = ([key if key in fixed else key[:-1] for key in of_trace] for of_trace in keys)
        return first, second

    def _key(self, event: Event) -> tuple[Any, ...]:
        module = self._part.sub("", event.module)
        if isinstance(event, Operation):
            return ("operation", event.phase, event.name, module, (event.shape, event.bytes_moved))
        size = event.payload_bytes if isinstance(event, Start) else None
        return (type(event).__name__, event.phase, event.axis, event.kind, event.purpose, module, size)

    def _grow(self, short: _Item, long: _Item) -> _Item:
        event, other = short[0], long[0]
        if short == long:
            return short
        changes = self._grow_changes(short[1], long[1])
        # Between it and the first block there may be one list that grows, or two.
        blocks = (self._block(other) or 0) - (self._block(event) or 0)
        lists, rest = divmod(blocks, self._period)
        if rest or not 0 <= lists <= len(self._growths):
            raise NotPeriodic(f"{other.module} for {event.module}")
        event = self._moved(event, self._period * sum(growth.periods for growth in self._growths[:lists]))
        if isinstance(event, Operation):
            assert isinstance(other, Operation)
            event = replace(
                event,
                flops=self._grown(event.flops, other.flops),
                bytes_moved=self._grown(event.bytes_moved, other.bytes_moved),
                shape=tuple(int(self._grown(*sizes)) for sizes in zip(event.shape, other.shape, strict=True)),
            )
        elif isinstance(event, Start):
            assert isinstance(other, Start)
            event = replace(event, payload_bytes=self._grown(event.payload_bytes, other.payload_bytes))
        return event, changes

    def _grow_changes(self, short: Changes, long: Changes) -> Changes:
        if [c for c, _ in short] == [c for c, _ in long]:
            return [(c, self._grown(size, more)) for (c, size), (_, more) in zip(short, long, strict=True)]
        # Another number of tensors (an optimizer's, one for each parameter): what all of them take and what they give back,
        # which of it comes first as in the longer trace.
        out: Changes = []
        for sign in (-1, 1) if long and long[0][1] < 0 else (1, -1):
            for category in CATEGORIES:
                size, more = (
                    sum(size for c, size in changes if c == category and size * sign > 0)
                    for changes in (short, long)
                )
                if size or more:
                    out.append((category, self._grown(size, more)))
        return out

    def _grown(self, short: float, long: float) -> float:
        """Each list of like blocks adds as much to what is not of one block."""
        return short + (long - short) * self._periods / len(self._growths)

    def _block(self, event: Event) -> int | None:
        module = event.module
        if module not in self._block_of:
            found = self._part.search(module)
            self._block_of[module] = int(found[2]) if found else None
        return self._block_of[module]

    def _moved(self, event: Event, shift: int) -> Event:
        if not shift or self._block(event) is None:
            return event
        moved = (event.module, shift)
        if moved not in self._moved_modules:
            self._moved_modules[moved] = self._part.sub(
                lambda m: m[0][: m.start(2) - m.start()] + str(int(m[2]) + shift), event.module
            )
        return replace(event, module=self._moved_modules[moved])


def _by_phase(trace: Trace) -> list[tuple[str, list[_Item]]]:
    """Recomputation runs inside backward and belongs to it."""
    items = list(zip(trace.events, map(list, trace.changes[:-1]), strict=True))

    def phase(item: _Item) -> str:
        return "backward" if item[0].phase == "recompute" else item[0].phase

    return [(name, list(of_phase)) for name, of_phase in groupby(items, phase)]


def _differences(short: list[tuple[Any, ...]], long: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
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
