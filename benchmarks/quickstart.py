"""Does the README's quick start work exactly as written, from an empty virtual environment to an exported model, in ten minutes?

The loops of examples/ run after it, in the same environment: the custom loop on 8 ranks has the losses of the stock loop.

    python -m benchmarks.quickstart
    python -m benchmarks.quickstart --here      the environment that runs this, instead of a new one
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 600.0
ROOT = Path(__file__).parent.parent
ENVIRONMENT = "quickstart-env"
LOOPS = (
    "python examples/stock_loop.py",
    "OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 examples/custom_loop.py",
)
LOSS_THRESHOLD = 1e-3


def commands(readme: str) -> str:
    """The first block of shell commands below the heading "Quick start"."""
    return readme.split("## Quick start")[1].split("```bash\n")[1].split("```")[0]


def without_installing(block: str) -> str:
    """The commands without those that create the environment."""
    kept = [line for line in block.splitlines() if not line.startswith(("pip install", "python3 -m venv"))]
    return "\n".join(kept) + "\n"


def shell(block: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run commands in a clean environment, without the one that runs this."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "OMP_"))}
    clean["PATH"] = os.pathsep.join(
        p for p in clean["PATH"].split(os.pathsep) if p != str(Path(sys.executable).parent)
    )
    clean["PIP_QUIET"] = "1"  # where it found its packages is not a result
    return subprocess.run(
        ["bash", "-e", "-c", block], cwd=folder, env=clean, text=True, capture_output=True, check=False
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--here", action="store_true", help="use the environment that runs this")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "fourfold"
        # What is committed: a checkout may hold what an earlier quick start made.
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        block = commands((copy / "README.md").read_text())
        if options.here:
            block = without_installing(block)
            (copy / ENVIRONMENT).symlink_to(sys.prefix)
        start_s = time.perf_counter()
        result = shell(block, copy)
        took_s = time.perf_counter() - start_s
        print(result.stdout)
        if result.returncode:
            print(result.stderr[-6000:])
            print(f"quickstart: failed with exit code {result.returncode} after {took_s:.0f} s")
            return 1
        lines = [json.loads(line) for line in (copy / "logs/metrics.jsonl").read_text().splitlines()]
        files = sorted(p.name for p in (copy / "exported").iterdir())
        loops = (
            [] if options.here else [shell(f". {ENVIRONMENT}/bin/activate\n{loop}\n", copy) for loop in LOOPS]
        )
    said = result.stdout.strip().splitlines()[-1]
    print(f"exported: {', '.join(files)}")
    print(
        f"quickstart: loss {lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}, {took_s:.0f} s of {LIMIT_S:.0f} s allowed"
    )
    holds = lines[-1]["loss"] < lines[0]["loss"] and "model.safetensors" in files and bool(said)
    if loops:
        stock, custom = (
            [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", loop.stdout, re.M)]
            for loop in loops
        )
        apart = max((abs(a - b) for a, b in zip(stock, custom, strict=False)), default=float("inf"))
        print(f"loops: {len(stock)} and {len(custom)} steps, losses differ by {apart:.1e}")
        holds = holds and len(stock) == len(custom) == 10 and apart <= LOSS_THRESHOLD
    return 0 if holds and took_s <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
