"""`fourfold drill` as a user starts it: every scenario, with its own ranks under the launcher.

With ``broken`` runs do not resume from checkpoints: a disturbed run is rejected when it is restarted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults import traced_run
from benchmarks.faults.row import Row

GRIDS = ({"data": 2}, {"z": 2, "x": 2})
ONE = "kill:at=write,rank=1,step=4,name=rank-*.safetensors"


def run(small: bool, broken: bool = False) -> Iterator[Row]:
    for sizes in GRIDS[: 1 if small else 2]:
        with tempfile.TemporaryDirectory() as folder:
            file = traced_run.write(Path(folder, "run"), grid=sizes)
            command = [sys.executable, "-m", "fourfold", "drill", str(file), "--folder", f"{folder}/drill"]
            command += [f"--fault={ONE}"] if small else []
            command += ["--set", "checkpoints.resume=false"] if broken else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        right = sum(line.startswith("right") for line in lines)
        wrong = [line.strip() for line in lines if line.startswith(("WRONG", "   "))]
        where = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        yield Row(
            f"`fourfold drill` on {where}: a run disturbed in one way after the other ends as the undisturbed one",
            f"{right}/{right + sum(line.startswith('WRONG') for line in lines)} right"
            + (f"; {wrong[0]:.160}" if wrong else "" if right else f"; {done.stderr[-200:]}"),
            "all",
            done.returncode == 0 and right > 1,
            "no other project has one (a search of nine)",
        )
