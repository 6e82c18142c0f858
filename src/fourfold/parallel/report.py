"""What `parallelize` did: a row for each module, printable as a table."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from fourfold.hf.parameter_layout import ParameterLayout
from fourfold.mesh.grid import Grid
from fourfold.parallel.sequence import Activations


@dataclass(frozen=True)
class Row:
    """One module: what it was, what it is now, where its parameters are, and why."""

    module: str
    role: str
    placement: str
    why: str


@dataclass(frozen=True)
class Report:
    """The outcome of `parallelize`; ``print(report)`` shows it, blocks that are alike in one line."""

    model: str
    grid: Grid = field(repr=False)
    rows: tuple[Row, ...] = field(repr=False)
    notes: tuple[str, ...]
    # Every parameter by its name in the parallel model, and where it comes from.
    layouts: Mapping[str, ParameterLayout] = field(repr=False)
    interleaved: bool = False  # the halves of a batch take turns
    activations: Activations = "replicated"

    def local_parameters(self) -> int:
        """Numbers that this rank stores."""
        total = 0
        for layout in self.layouts.values():
            size = 1
            for piece in layout.shard(self.grid):
                size *= piece.stop - piece.start
            total += size
        return total

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str, str], int] = {}
        for row in self.rows:
            key = (re.sub(r"\.\d+(?=\.|$)", ".*", row.module), row.role, row.placement, row.why)
            groups[key] = groups.get(key, 0) + 1
        table = Table(title=f"{self.model} on {self.grid}", title_justify="left")
        for heading in ("module", "times", "role", "parameters", "why"):
            table.add_column(heading, justify="right" if heading == "times" else "left")
        for (module, role, placement, why), count in groups.items():
            table.add_row(module, str(count), role, placement, why)
        out = io.StringIO()
        Console(file=out, width=140).print(table)
        for note in self.notes:
            out.write(f"{note}\n")
        out.write(f"this rank stores {self.local_parameters():,} parameters\n")
        return out.getvalue()


def describe(layouts: list[ParameterLayout]) -> str:
    """Where the parameters of a module are, in words."""
    parts = []
    for layout in layouts:
        cuts = ", ".join(
            f"dim {dim} on {axis}" for axis, dim in sorted(layout.cuts.items(), key=lambda c: c[1])
        )
        parts.append(f"{'x'.join(map(str, layout.shape))}: {cuts or 'replicated on y, x'}")
    return "; ".join(dict.fromkeys(parts))
