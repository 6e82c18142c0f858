"""Where the time of a step went: to computation, and to waiting for each axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fourfold.grid import AXES, Axis, Grid
from fourfold.parallel.clock import clock_of
from fourfold.parallel.collectives import Entry


@dataclass
class StepReport:
    """The seconds of one rank in one step; filled in when the step is over.

    On CPU ``compute_s`` is what the kernel says that the thread was busy, or would have been with a core of its own: it
    is measured for itself, so what remains of the step, `other_s`, is waiting that nobody accounted for. On CUDA it is
    the time that the stream which computes did not wait; there the waits of FSDP2 are its own and count as computation.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    def exposed_s(self, axis: Axis | None = None) -> float:
        """Seconds that this rank stood waiting for an axis, or for all of them."""
        return sum(e.exposed_s for e in self.entries if axis is None or e.axis == axis)

    @property
    def other_s(self) -> float:
        return self.step_s - self.compute_s - self.exposed_s()

    def __str__(self) -> str:
        lines = [f"step {self.step_s:.4f} s = compute {self.compute_s:.4f}"]
        lines += [f"{axis} {self.exposed_s(axis):.4f}" for axis in AXES if self.exposed_s(axis)]
        return " + ".join([*lines, f"other {self.other_s:.4f}"])


@contextmanager
def measure_step(grid: Grid) -> Iterator[StepReport]:
    """Time what happens inside, and the waiting in it.

    Example:
        >>> with measure_step(grid) as report:
        ...     model(input_ids=ids, labels=ids).loss.backward()
        >>> report.exposed_s() <= report.step_s
        True
    """
    report = StepReport()
    clock = clock_of(grid.device.type)
    with grid.collectives.counting() as entries, grid.collectives.computing() as computing_s:
        start = clock.mark()
        yield report
        end = clock.mark()
    report.entries = entries
    report.step_s = clock.elapsed_s(start, end)
    # A host that only starts kernels is not what computes.
    report.compute_s = computing_s[0] if clock.immediate else report.step_s - report.exposed_s()
