"""Does the README's quick start work exactly as written, from an empty virtual environment to an exported model, in ten minutes?

The script of "In your own loop" runs after it, in the same environment.

    python -m benchmarks.quickstart
    python -m benchmarks.quickstart --here      the environment that runs this, instead of a new one
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 600.0
ROOT = Path(__file__).parent.parent
ENVIRONMENT = "quickstart-env"
OWN_LOOP = "OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 examples/quickstart.py"


def commands(readme: str) -> str:
    """The first block of shell commands below the heading "Quick start"."""
    return readme.split("## Quick start")[1].split("```bash\n")[1].split("```")[0]


def script(readme: str) -> str:
    """The first block of Python below the heading "In your own loop"."""
    return readme.split("## In your own loop")[1].split("```python\n")[1].split("```")[0]


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
    return subprocess.run(
        ["bash", "-e", "-c", block], cwd=folder, env=clean, text=True, capture_output=True, check=False
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--here", action="store_true", help="use the environment that runs this")
    options = parser.parse_args(arguments)
    readme = (ROOT / "README.md").read_text()
    if script(readme) != (ROOT / "examples/quickstart.py").read_text():
        print("quickstart: the script in the README is not examples/quickstart.py")
        return 1
    block = commands(readme)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "fourfold"
        ignored = shutil.ignore_patterns(".git", ".ci", ".venv", "venv", "*.egg-info", "build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
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
        own_loop = None if options.here else shell(f". {ENVIRONMENT}/bin/activate\n{OWN_LOOP}\n", copy)
    said = result.stdout.strip().splitlines()[-1]
    print(f"exported: {', '.join(files)}")
    print(
        f"quickstart: loss {lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}, {took_s:.0f} s of {LIMIT_S:.0f} s allowed"
    )
    holds = lines[-1]["loss"] < lines[0]["loss"] and "model.safetensors" in files and bool(said)
    if own_loop is not None:
        losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", own_loop.stdout, re.M)]
        print(f"own loop: {len(losses)} steps, loss {losses[:1]} to {losses[-1:]}")
        holds = holds and len(losses) == 10 and losses[-1] < losses[0]
    return 0 if holds and took_s <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
