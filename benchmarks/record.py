"""Run a benchmark and keep its standard output, for the page of what is checked (docs/site/results.py).

A record is a file of benchmarks/results, named by the command: here parity-ranks-8.json.

    python -m benchmarks.record parity --ranks 8
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


def file_of(words: list[str]) -> str:
    """The name of a record; where a figure is drawn is not part of it.

    Example:
        >>> file_of(["parity", "--ranks", "8"])
        'parity-ranks-8.json'
        >>> file_of(["regret", "--figure", "docs/regret.png"])
        'regret.json'
    """
    if "--figure" in words:
        at = words.index("--figure")
        words = words[:at] + words[at + 2 :]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()) + ".json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", help="the name of the benchmark")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its options")
    options = parser.parse_args(arguments)
    words = [options.benchmark, *options.options]
    git = ["git", "-C", str(FOLDER)]
    commit = subprocess.check_output([*git, "describe", "--always"], text=True).strip()
    # Other records may have changed: they are not what runs.
    if subprocess.call([*git, "diff", "--quiet", "HEAD", "--", ":/", ":(exclude,top)benchmarks/results"]):
        commit += "-dirty"
    start_s = time.perf_counter()
    lines = []
    command = [sys.executable, "-u", "-m", f"benchmarks.{words[0]}", *words[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    record = {
        "command": f"python -m benchmarks.{' '.join(words)}",
        "date": date.today().isoformat(),
        "commit": commit,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "exit_code": process.returncode,
        "seconds": round(time.perf_counter() - start_s),
        "output": lines,
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / file_of(words)).write_text(json.dumps(record, indent=1) + "\n")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
