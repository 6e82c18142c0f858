"""From what ranks say of themselves to the one sentence that matters: who is missing, and in which collective.

A rank that waits names its collective; who of that group has not come is followed to what that one waits for in turn,
until somebody waits for nothing: that is who everybody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fourfold.mesh.axes import AXES, Axis
from fourfold.train.resilience.hang.place import InFlight, Place


@dataclass(frozen=True)
class Missing:
    """A rank that others wait for."""

    rank: int
    place: Place | None  # the last that was heard of it
    waiting: Place  # one of those that wait
    flight: InFlight | None  # in which collective


def group_of(rank: int, axis: Axis, shape: Sequence[int]) -> list[int]:
    """The ranks of an axis that this one meets.

    Example:
        >>> group_of(5, "z", (1, 2, 2, 2)), group_of(5, "x", (1, 2, 2, 2))
        ([1, 5], [4, 5])
    """
    below = 1
    for name, size in zip(reversed(AXES), reversed(shape), strict=True):
        if name == axis:
            first = rank - rank // below % size * below
            return [first + i * below for i in range(size)]
        below *= size
    raise AssertionError(axis)


def find_missing(
    reports: Mapping[int, Place],
    seen: Mapping[int, Place],
    shape: Sequence[int],
    *,
    now_s: float,
    stale_s: float,
) -> list[Missing]:
    """Who everybody waits for.

    ``reports`` are of ranks that wait for too long or have failed, ``seen`` the last signs of life of all. Without a
    report, a sign of life older than ``stale_s`` is that of a rank that is dead or stopped.
    """
    missing: dict[int, Missing] = {}
    done: set[int] = set()
    # Who has an error of its own is the cause, and no other is looked for.
    for rank, place in sorted(reports.items()):
        if place.error and not place.in_flight and not _is_lost_peer(place.error):
            missing[rank] = Missing(rank, place, place, None)
    todo = [rank for rank, place in sorted(reports.items()) if place.in_flight]
    while todo and not (missing and all(m.flight is None for m in missing.values())):
        rank = todo.pop()
        place = reports.get(rank) or seen[rank]
        if rank in done or not place.in_flight:
            continue
        done.add(rank)
        flight = place.in_flight[0]
        for peer in group_of(rank, flight.axis, shape):
            if peer == rank:
                continue
            other = reports.get(peer) or seen.get(peer)
            has_reported = peer in reports
            is_gone = not has_reported and (
                other is None or _is_lost_peer(place.error) or now_s - other.time > stale_s
            )
            arrived = other is not None and other.counts.get(flight.axis, 0) >= flight.number
            if is_gone or (not arrived and other is not None and not other.in_flight):
                before = missing.get(peer)
                if before is None or before.flight is None or before.flight.age_s < flight.age_s:
                    missing[peer] = Missing(peer, other, place, flight)
            elif not arrived:
                todo.append(peer)
    if not missing:
        # A peer was lost where no collective of a step is, as in a save: it is who has not said a word.
        lost = [place for place in reports.values() if _is_lost_peer(place.error)]
        silent = sorted(set(range(prod(shape))) - set(reports))
        if lost and 2 * len(silent) <= prod(shape):
            missing = {rank: Missing(rank, seen.get(rank), lost[0], None) for rank in silent}
    return [missing[rank] for rank in sorted(missing)]


def _is_lost_peer(error: str) -> bool:
    """Does the back end say that a connection was closed, and not that time is up?"""
    return any(
        word in error for word in ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
    )


def summarise(found: Sequence[Missing], reports: Mapping[int, Place], *, now_s: float) -> str:
    """The sentence, and a line for each rank that reported."""
    lines = []
    by_flight: dict[str, list[Missing]] = {}
    for m in found:
        where = f"{m.flight.words}, step {m.waiting.step}" if m.flight else f"step {m.waiting.step}"
        by_flight.setdefault(where, []).append(m)
    for where, several in by_flight.items():
        names = _names([m.rank for m in several])
        verb = "failed" if all(m.flight is None for m in several) else "never arrived"
        last = []
        for m in several:
            if m.place is None:
                last.append(f"rank {m.rank} was never heard of")
                continue
            what = (
                m.place.error.strip().splitlines()[-1] if m.place.error else f"last seen in {m.place.doing}"
            )
            last.append(
                f"rank {m.rank} on {m.place.host} (process {m.place.process}): {what}, step {m.place.step}, "
                f"{max(0.0, now_s - m.place.time):.1f} s ago"
            )
        lines.append(f"{where}: {names} {verb}; {'; '.join(last)}")
    if not found:
        lines.append(f"{_names(sorted(reports))} waited for too long; nobody is known to be missing")
    lines += [f"  rank {rank}: {line_of(place)}" for rank, place in sorted(reports.items())[:64]]
    if len(reports) > 64:
        lines.append(f"  and {len(reports) - 64} more ranks, each in a file of its own")
    return "\n".join(lines)


def line_of(place: Place) -> str:
    flights = ", ".join(f"{f.words} for {f.age_s:.1f} s" for f in place.in_flight[:3]) or "nothing"
    return f"step {place.step}, in {place.doing}; in flight: {flights}"


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
