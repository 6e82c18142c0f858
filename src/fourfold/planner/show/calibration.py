"""A calibration as a cluster file and as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fourfold.planner.calibrate.calibrate import Calibration
from fourfold.planner.inputs.cluster import to_toml


def as_file(result: Calibration) -> str:
    """The cluster file, with the spread of each parameter in comments."""
    lines = [f"# Measured in {result.seconds:.0f} s. Medians; interquartile ranges in brackets."]
    lines += [f"# {p.name} = {p.value:.4g} [{p.spread:.2g}] {p.unit}" for p in result.parameters]
    return "\n".join(lines) + "\n" + to_toml(result.cluster)


def show(result: Calibration) -> None:
    """Print the fitted parameters, and how far the formulas are from each measurement."""
    console = Console(width=120)
    table = Table(title=f"{result.cluster.name}, measured in {result.seconds:.0f} s", title_justify="left")
    for heading in ("parameter", "fitted", "interquartile range", "unit"):
        table.add_column(heading, justify="left" if heading in ("parameter", "unit") else "right")
    for p in result.parameters:
        table.add_row(p.name, f"{p.value:.4g}", f"{p.spread:.2g}", p.unit)
    console.print(table)
    table = Table(
        title="formulas with these parameters, compared with each measurement", title_justify="left"
    )
    for heading in ("what", "measured", "formula", "off by"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for d in result.deviations:
        table.add_row(
            d.what, f"{d.measured_s * 1e3:.3f} ms", f"{d.formula_s * 1e3:.3f} ms", f"{d.error:+.0%}"
        )
    console.print(table)
    console.print(
        "A plan uses the measurements where there are any, and the formulas for other sizes and axes."
    )
