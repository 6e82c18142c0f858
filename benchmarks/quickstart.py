"""Does the README's quick start work, word by word, from an empty virtual environment, in under five minutes?

python -m benchmarks.quickstart
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 300.0
ROOT = Path(__file__).parent.parent


def commands(readme: str) -> str:
    """The first block of shell commands below the heading "Quick start"."""
    return readme.split("## Quick start")[1].split("```bash\n")[1].split("```")[0]


def script(readme: str) -> str:
    """The first block of Python below the heading "Quick start"."""
    return readme.split("## Quick start")[1].split("```python\n")[1].split("```")[0]


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    readme = (ROOT / "README.md").read_text()
    if script(readme) != (ROOT / "examples/quickstart.py").read_text():
        print("quickstart: the script in the README is not examples/quickstart.py")
        return 1
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "fourfold"
        ignored = shutil.ignore_patterns(".git", ".venv", "venv", "*.egg-info", "build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        # Nothing of the environment that runs this may help.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "OMP_"))}
        clean["PATH"] = os.pathsep.join(
            p for p in clean["PATH"].split(os.pathsep) if p != str(Path(sys.executable).parent)
        )
        start_s = time.perf_counter()
        result = subprocess.run(
            ["bash", "-e", "-c", commands(readme)],
            cwd=copy,
            env=clean,
            text=True,
            capture_output=True,
            check=False,
        )
        took_s = time.perf_counter() - start_s
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", result.stdout, re.M)]
    print(result.stdout)
    if result.returncode or len(losses) != 10 or not losses[-1] < losses[0]:
        print(result.stderr[-4000:])
        print(
            f"quickstart: failed with exit code {result.returncode} and {len(losses)} steps after {took_s:.0f} s"
        )
        return 1
    print(
        f"quickstart: {len(losses)} steps, loss {losses[0]} to {losses[-1]}, {took_s:.0f} s of {LIMIT_S:.0f} s allowed"
    )
    return 0 if took_s <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
