"""A timeline of a step for chrome://tracing or ui.perfetto.dev: the profiler's trace, with every collective and wait named.

PyTorch's profiler shows operators and, on CUDA, kernels. This adds two processes to its trace: the collectives in flight,
with one track for each axis, and the waits for them. On CUDA the profiler shows the kernel of a collective; the event
added here reaches from its start on the host to the wait for it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile

from fourfold.mesh.axes import AXES, axis_of_mesh
from fourfold.mesh.collectives import InFlightCollective
from fourfold.mesh.grid import Grid

# Process ids of the added tracks; higher than any real process id (at most 2^22 on Linux).
_IN_FLIGHT, _WAITS = 10_000_001, 10_000_002


@contextmanager
def timeline(path: str | Path, grid: Grid) -> Iterator[None]:
    """Write a trace of the body to ``path``, from rank 0; if ``path`` contains ``{rank}``, from every rank.

    Example:
        >>> with timeline(folder / "step.json", grid):
        ...     model(input_ids=ids, labels=ids).loss.backward()
    """
    rank = dist.get_rank()
    writes = rank == 0 or "{rank}" in str(path)
    if not writes:
        yield
        return
    with grid.collectives.recording() as flights, profile() as profiler:
        yield
        if grid.device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text())
    trace["traceEvents"] += events(flights, origin_ns=trace["baseTimeNanoseconds"])
    trace["fourfold"] = {"grid": str(grid), "rank": rank}
    Path(str(path).replace("{rank}", str(rank))).write_text(json.dumps(trace))


def events(flights: list[InFlightCollective], origin_ns: int) -> list[dict[str, Any]]:
    """The trace events of collectives and waits; times are in microseconds since ``origin_ns``."""

    def micro(ns: int) -> float:
        return (ns - origin_ns) / 1e3

    def named(process: int, what: str, **fields: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, **fields}

    out: list[dict[str, Any]] = []
    for process, name, order in ((_IN_FLIGHT, "collectives in flight", -2), (_WAITS, "waits", -1)):
        out.append(named(process, "process_name", args={"name": name}))
        out.append(named(process, "process_sort_index", args={"sort_index": order}))
        out += [named(process, "thread_name", tid=i, args={"name": axis}) for i, axis in enumerate(AXES)]
    for i, flight in enumerate(flights):
        track = AXES.index(axis_of_mesh(flight.axis))
        name = f"{flight.axis} {flight.kind} {flight.module or flight.purpose}"
        arguments = {
            **{field: getattr(flight, field) for field in ("axis", "kind", "purpose", "module")},
            "bytes": flight.payload_bytes,
            "exposed_s": sum(end - start for start, end in flight.waits_ns) / 1e9,
        }
        end_ns = flight.done_ns or max((end for _, end in flight.waits_ns), default=flight.issued_ns)
        # Asynchronous events, because several collectives of one axis may be in flight at once.
        common = {"cat": "collective", "id": i, "pid": _IN_FLIGHT, "tid": track, "name": name}
        out.append({**common, "ph": "b", "ts": micro(flight.issued_ns), "args": arguments})
        out.append({**common, "ph": "e", "ts": micro(end_ns)})
        for start_ns, stop_ns in flight.waits_ns:
            wait = {"ph": "X", "cat": "wait", "pid": _WAITS, "tid": track, "name": f"wait {name}"}
            out.append({**wait, "ts": micro(start_ns), "dur": (stop_ns - start_ns) / 1e3, "args": arguments})
    return out
