"""Does a run survive what clusters do? Every fault is planted for real, and each row has a bar.

    python -m benchmarks.faults                   # all of it
    python -m benchmarks.faults --only saves,numbers
    python -m benchmarks.faults --small           # fewer of each; the bars are the same
    python -m benchmarks.faults --only saves --break  # without what protects: rows go past their bars

The last column is what others show, from the research of the field or from the bare engine. It ends with 1 if a row is
past its bar. All on CPU with Gloo; no GPU has run this.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
from collections.abc import Sequence

from benchmarks.faults.row import Part, Row

# In the order of what they need: files alone, then ranks, then clusters.
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
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="fewer of each")
    parser.add_argument(
        "--break", dest="broken", action="store_true", help="switch off what protects, to see the bars fail"
    )
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    parts: dict[str, Part] = {
        name: importlib.import_module(f"benchmarks.faults.{name}").run for name in wanted
    }
    whole = [name for name in parts if "broken" not in inspect.signature(parts[name]).parameters]
    if options.broken and whole:
        parser.error(f"{', '.join(whole)} cannot --break; give the others by --only")
    rows: list[Row] = []
    for name, part in parts.items():
        start_s = time.monotonic()
        for row in part(options.small, **({"broken": True} if options.broken else {})):
            rows.append(row)
            print(
                f"{'holds' if row.holds else 'PAST '}  {row.what}: {row.figure} (bar {row.bar})", flush=True
            )
        print(f"       {name}: {time.monotonic() - start_s:.0f} s", flush=True)
    print(table(rows))
    past = sum(not row.holds for row in rows)
    print(f"faults: {len(rows) - past}/{len(rows)} bars hold")
    return 1 if past or not rows else 0


def table(rows: list[Row]) -> str:
    lines = ["", "| what | figure | bar | holds | others |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.what} | {r.figure} | {r.bar} | {'yes' if r.holds else '**no**'} | {r.others} |" for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
