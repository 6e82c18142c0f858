"""How long does a person wait for `fourfold plan`? The command as it is typed, from its start to its end.

On one core; with --simulate on all that there are, as dry runs use them.

python -m benchmarks.plan_latency
python -m benchmarks.plan_latency --sizes 70b --presets dgx-h100
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fourfold.text_tables import as_text, table

LIMIT_S = 10.0
SIMULATED_LIMIT_S = 60.0
SIMULATED = 5
GPUS = {"1b": 8, "8b": 64, "70b": 256, "405b": 4096, "1t": 16384}
PRESETS = ("dgx-h100", "dgx-a100", "perlmutter-80g", "frontier", "alps-gh200", "dgx-b200")


def seconds_of(size: str, preset: str, simulate: int = 0) -> float:
    """The wall time of the command; formulas have one core."""
    words = [
        "plan",
        "--size",
        size,
        "--cluster",
        preset,
        "--gpus",
        str(GPUS[size]),
        "--simulate",
        str(simulate),
    ]
    cores = os.sched_getaffinity(0)
    cores = cores if simulate else {min(cores)}
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        capture_output=True,
        text=True,
        check=False,
    )
    took_s = time.perf_counter() - start_s
    # A model that fits on none of the layouts is an answer, too.
    if done.returncode and "layouts of" not in done.stderr:
        raise RuntimeError(f"fourfold {' '.join(words)}: {done.stderr}")
    return took_s


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds to this file")
    options = parser.parse_args(arguments)
    found = {preset: {size: seconds_of(size, preset) for size in options.sizes} for preset in options.presets}
    simulated_s = seconds_of("70b", "dgx-h100", SIMULATED)
    if options.json:
        options.json.write_text(json.dumps({"formulas_s": found, "simulated_s": simulated_s}, indent=1))
    columns = ("preset", *(f"{size} on {GPUS[size]:,}" for size in options.sizes))
    rows = [(preset, *(f"{each:.1f} s" for each in by_size.values())) for preset, by_size in found.items()]
    print(as_text(100, table("fourfold plan, one core", columns, rows)))
    worst_s = max(each for by_size in found.values() for each in by_size.values())
    count = sum(map(len, found.values()))
    print(
        f"plan latency: {count} plans in at most {worst_s:.1f} s ({LIMIT_S:.0f} s allowed); 70b on {GPUS['70b']} with --simulate "
        f"{SIMULATED} in {simulated_s:.1f} s on {len(os.sched_getaffinity(0))} cores ({SIMULATED_LIMIT_S:.0f} s allowed)"
    )
    return 0 if worst_s <= LIMIT_S and simulated_s <= SIMULATED_LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
