"""From the status of all ranks to the one sentence that matters: which rank is missing, and in which collective.

A rank that waits names its collective. A peer in that group that has not arrived may wait in another collective; following
these waits leads to a rank that waits for nothing: all others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fourfold.mesh.axes import AXES, SEQUENCE, Z_AND_X, Axis, axis_of_mesh
from fourfold.train.resilience.hang.status import InFlight, RankStatus


@dataclass(frozen=True)
class Missing:
    """A rank that others wait for."""

    rank: int
    status: RankStatus | None  # the last one known
    waiting: RankStatus  # of one that waits for it
    flight: InFlight | None  # the collective in which it waits


def axis_group(rank: int, axis: Axis, shape: Sequence[int], sequence_ranks: int = 1) -> list[int]:
    """The ranks of this rank's process group on an axis; ``sequence_ranks`` are those of z that share sequences.

    Example:
        >>> axis_group(5, "z", (1, 2, 2, 2)), axis_group(5, "x", (1, 2, 2, 2))
        ([1, 5], [4, 5])
        >>> axis_group(5, "sequence", (1, 8, 1, 1), sequence_ranks=2)
        [4, 5]
        >>> axis_group(5, "zx", (1, 2, 2, 2))
        [0, 1, 4, 5]
    """
    if axis == Z_AND_X:
        return sorted(r for of_z in axis_group(rank, "z", shape) for r in axis_group(of_z, "x", shape))
    place = AXES.index(axis_of_mesh(axis))
    size, stride = shape[place], prod(shape[place + 1 :])
    if axis == SEQUENCE:
        size = sequence_ranks
    first = rank - rank // stride % size * stride
    return [first + i * stride for i in range(size)]


def find_missing(
    reports: Mapping[int, RankStatus],
    heartbeats: Mapping[int, RankStatus],
    shape: Sequence[int],
    *,
    stale_s: float,
    sequence_ranks: int = 1,
) -> list[Missing]:
    """The ranks that all others wait for.

    ``reports`` come from ranks that have timed out or failed, ``heartbeats`` are the last ones of the other ranks. A rank
    whose heartbeat is older than ``stale_s`` is dead or stopped.
    """
    missing: dict[int, Missing] = {}
    done: set[int] = set()
    # A rank with an error of its own is the cause.
    for rank, status in sorted(reports.items()):
        if status.error and not status.in_flight and not _is_lost_peer(status.error):
            missing[rank] = Missing(rank, status, status, None)
    todo = [rank for rank, status in sorted(reports.items()) if status.in_flight]
    while todo and not (missing and all(m.flight is None for m in missing.values())):
        rank = todo.pop()
        status = reports.get(rank) or heartbeats[rank]
        if rank in done or not status.in_flight:
            continue
        done.add(rank)
        flight = status.in_flight[0]
        for peer in axis_group(rank, flight.axis, shape, sequence_ranks):
            if peer == rank:
                continue
            other = reports.get(peer) or heartbeats.get(peer)
            has_reported = peer in reports
            is_gone = not has_reported and (
                other is None or _is_lost_peer(status.error) or other.age_s > stale_s
            )
            arrived = other is not None and other.counts.get(flight.axis, 0) >= flight.number
            if is_gone or (not arrived and other is not None and not other.in_flight):
                before = missing.get(peer)
                if before is None or before.flight is None or before.flight.age_s < flight.age_s:
                    missing[peer] = Missing(peer, other, status, flight)
            elif not arrived:
                todo.append(peer)
    if not missing:
        # A peer was lost outside the collectives of a step, such as in a save: it is the one without a report.
        lost = [status for status in reports.values() if _is_lost_peer(status.error)]
        silent = sorted(set(range(prod(shape))) - set(reports))
        if lost and 2 * len(silent) <= prod(shape):
            missing = {rank: Missing(rank, heartbeats.get(rank), lost[0], None) for rank in silent}
    return [missing[rank] for rank in sorted(missing)]


def _is_lost_peer(error: str) -> bool:
    """Does the backend report a closed connection, rather than a timeout?"""
    return any(
        word in error for word in ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
    )


def summarise(found: Sequence[Missing], reports: Mapping[int, RankStatus]) -> str:
    """The sentence, and a line for each rank that has reported."""
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
            status = m.status
            if status is None:
                last.append(f"rank {m.rank} has sent no heartbeat")
                continue
            what = status.error.strip().splitlines()[-1] if status.error else f"last seen in {status.doing}"
            last.append(
                f"rank {m.rank} on {status.host} (process {status.process}): {what}, step {status.step}, "
                f"{status.age_s:.1f} s ago"
            )
        lines.append(f"{where}: {names} {verb}; {'; '.join(last)}")
    if not found:
        lines.append(f"{_names(sorted(reports))} timed out; no rank is known to be missing")
    lines += [f"  rank {rank}: {describe_status(status)}" for rank, status in sorted(reports.items())[:64]]
    if len(reports) > 64:
        lines.append(f"  and {len(reports) - 64} more ranks, each in a file of its own")
    return "\n".join(lines)


def describe_status(status: RankStatus) -> str:
    flights = ", ".join(f"{f.words} for {f.age_s:.1f} s" for f in status.in_flight[:3]) or "nothing"
    return f"step {status.step}, in {status.doing}; in flight: {flights}"


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
