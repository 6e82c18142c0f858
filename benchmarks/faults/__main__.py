"""Does a run survive the faults of clusters? Every fault is really injected, and each row has a threshold.

    python -m benchmarks.faults                   # all of it
    python -m benchmarks.faults --only saves,numbers
    python -m benchmarks.faults --small           # fewer of each; the thresholds are the same
    python -m benchmarks.faults --only saves --break  # without the protection: rows exceed their thresholds

The last column has results of others, from publications or from PyTorch alone. The exit code is 1 if a row exceeds its
threshold. All of it runs on CPU with Gloo; no GPU has run this.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
from collections.abc import Sequence

from benchmarks.faults.row import Part, Row

# Ordered by what they need: files, then ranks, then clusters.
PARTS: tuple[str, ...] = (
    "saves",
    "hostile",
    "peers",
    "numbers",
    "scenarios",
    "kills",
    "torchft_replicas",
    "slurm",
    "elastic",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), help="comma-separated parts, of " + ", ".join(PARTS)
    )
    parser.add_argument("--small", action="store_true", help="fewer of each")
    parser.add_argument(
        "--break",
        dest="broken",
        action="store_true",
        help="switch off the protection, to see the thresholds exceeded",
    )
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    parts: dict[str, Part] = {
        name: importlib.import_module(f"benchmarks.faults.{name}").run for name in wanted
    }
    unbreakable = [name for name in parts if "broken" not in inspect.signature(parts[name]).parameters]
    if options.broken and unbreakable:
        parser.error(f"{', '.join(unbreakable)} cannot --break; give the others by --only")
    rows: list[Row] = []
    for name, part in parts.items():
        start_s = time.monotonic()
        for row in part(options.small, **({"broken": True} if options.broken else {})):
            rows.append(row)
            print(
                f"{'holds' if row.holds else 'FAILS'}  {row.what}: {row.result} (threshold {row.threshold})",
                flush=True,
            )
        print(f"       {name}: {time.monotonic() - start_s:.0f} s", flush=True)
    print(table(rows))
    failed = sum(not row.holds for row in rows)
    print(f"faults: {len(rows) - failed}/{len(rows)} thresholds hold")
    return 1 if failed or not rows else 0


def table(rows: list[Row]) -> str:
    lines = ["", "| what | result | threshold | holds | others |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.what} | {r.result} | {r.threshold} | {'yes' if r.holds else '**no**'} | {r.others} |"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
