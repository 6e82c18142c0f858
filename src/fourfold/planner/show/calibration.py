"""A calibration as a cluster file and as tables."""

from __future__ import annotations

from fourfold.planner.calibrate.calibrate import Calibration
from fourfold.planner.calibrate.fit import Parameter
from fourfold.planner.inputs.cluster import to_toml
from fourfold.text_tables import as_text, table


def as_file(result: Calibration) -> str:
    """The cluster file, with the spread of each parameter in comments."""
    lines = [f"# Measured in {result.seconds:.0f} s. Medians; interquartile ranges in brackets."]
    lines += [f"# {p.name} = {p.value:.4g} [{_spread(p)}] {p.unit}" for p in result.parameters]
    return "\n".join(lines) + "\n" + to_toml(result.cluster)


def show(result: Calibration) -> str:
    """The fitted parameters, and how far the formulas are from each measurement."""
    title = f"{result.cluster.name}, measured in {result.seconds:.0f} s"
    rows = [(p.name, f"{p.value:.4g}", _spread(p), p.unit) for p in result.parameters]
    fitted = table(title, ("parameter", "fitted", "interquartile range", "unit"), rows, text=("unit",))
    title = "formulas with these parameters, compared with each measurement"
    rows = [
        (d.what, f"{d.measured_s * 1e3:.3f} ms", f"{d.formula_s * 1e3:.3f} ms", f"{d.error:+.0%}")
        for d in result.deviations
    ]
    deviations = table(title, ("what", "measured", "formula", "off by"), rows)
    use = "A plan uses the measurements where there are any, and the formulas for other sizes and axes."
    if unknown := [p.name for p in result.parameters if not p.is_measured]:
        use += (
            f" Nothing was sent over the link of {' and '.join(unknown)}, which are assumed: calibrate on two nodes or more, and on "
            "all devices of each, before you plan for several."
        )
    return as_text(120, fitted, deviations, use)


def _spread(parameter: Parameter) -> str:
    return f"{parameter.spread:.2g}" if parameter.is_measured else "not measured"
