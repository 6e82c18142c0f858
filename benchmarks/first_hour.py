"""Does each path of the README work word by word, from an empty virtual environment, and how long does it take?

quick start       from text to an exported model; at most 4 minutes after the installation
fine-tune         from the exported folder, as from any pretrained one
cluster           a job on a real Slurm of two nodes on this machine, whose GPUs are pretended: the ranks are on CPUs
own loop          the custom loop on 8 ranks has the losses of the stock loop
plan              plan a run config, write the layout into it, and train on it

python -m benchmarks.first_hour
python -m benchmarks.first_hour --here --only "quick start"      in the environment that runs this
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
from collections.abc import Callable
from pathlib import Path

from benchmarks import local_slurm

QUICK_START_S = 240.0
JOB_S = 1200.0  # a job that takes longer hangs
ROOT = Path(__file__).parent.parent
ENVIRONMENT = "quickstart-env"
STOCK_LOOP = "python examples/stock_loop.py\n"
LOSS_THRESHOLD = 1e-3
# path: the heading of the README that has its commands
PATHS = {
    "quick start": "Quick start",
    "fine-tune": "Fine-tune",
    "cluster": "On a cluster",
    "own loop": "In your own loop",
    "plan": "Plan before you run",
}
_INSTALLS = ("pip install", "python3 -m venv")


def commands(readme: str, heading: str = "Quick start") -> str:
    """All shell commands below a heading."""
    section = re.split(r"^## ", readme.split(f"## {heading}\n")[1], maxsplit=1, flags=re.M)[0]
    return "".join(re.findall(r"^```bash\n(.*?)^```$", section, re.M | re.S))


def split_installation(block: str) -> tuple[str, str]:
    """The commands that make the environment, and the others; both activate it."""
    lines = block.splitlines(keepends=True)
    first = "".join(line for line in lines if line.startswith((*_INSTALLS, ". ")))
    return first, "".join(line for line in lines if not line.startswith(_INSTALLS))


class Failed(Exception):
    """A command failed, or did not do what the README says."""


def shell(block: str, folder: Path) -> str:
    """Run commands in a clean environment, without the one that runs this; what they printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "OMP_"))}
    clean["PATH"] = os.pathsep.join(
        p for p in clean["PATH"].split(os.pathsep) if p != str(Path(sys.executable).parent)
    )
    clean["PIP_QUIET"] = "1"  # where it found its packages is not a result
    activated = (
        block if block.startswith(("python3 -m venv", ". ")) else f". {ENVIRONMENT}/bin/activate\n{block}"
    )
    done = subprocess.run(
        ["bash", "-e", "-c", activated], cwd=folder, env=clean, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise Failed(f"{block}{done.stdout[-2000:]}{done.stderr[-4000:]}exit code {done.returncode}")
    return done.stdout


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


def quick_start(copy: Path, block: str) -> str:
    lines = shell(split_installation(block)[1], copy).strip().splitlines()
    said = lines[-1]
    print(
        "\n".join(line for line in lines if line.startswith(("step  10/", "done:")))
    )  # as the README shows them
    found = losses(copy / "run")
    files = sorted(path.name for path in (copy / "exported").iterdir())
    require(found[-1] < found[0] - 0.5, f"the loss went from {found[0]} to {found[-1]}")
    require("model.safetensors" in files and bool(said), f"exported: {files}")
    return f"loss {found[0]:.4f} to {found[-1]:.4f}"


def fine_tune(copy: Path, block: str) -> str:
    shell(block, copy)
    before, after = losses(copy / "run"), losses(copy / "tune")
    require(after[0] < before[0] - 0.5, f"it began at {after[0]}, as random init does")
    return f"loss {after[0]:.4f} to {after[-1]:.4f}, from random init {before[0]:.4f}"


def with_own_run(copy: Path, name: str) -> Path:
    """A folder with the text and a new run config of the quick start: no step of it is done."""
    folder = copy / name
    folder.mkdir()
    for there in (ENVIRONMENT, "text"):
        (folder / there).symlink_to(copy / there)
    init = next(line for line in commands((copy / "README.md").read_text()).splitlines() if " init " in line)
    shell(f"{init}\n", folder)
    return folder


def cluster(copy: Path, block: str) -> str:
    if why := local_slurm.why_not():
        raise Failed(why)
    folder = with_own_run(copy, "on-slurm")
    place = copy / "slurm"
    place.mkdir()
    with local_slurm.slurm(place):
        job = re.findall(r"as job (\d+)", shell(block, folder))[0]
        local_slurm.wait_until(lambda: local_slurm.state(job) in local_slurm.ENDED, "end of the job", JOB_S)
        state = local_slurm.state(job)
    log = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("run/logs/**/*.log")))
    require(state == "COMPLETED", f"the job is {state}\n{log}")
    found = losses(folder / "run")
    require(found[-1] < found[0] - 0.5, f"the loss went from {found[0]} to {found[-1]}")
    return f"job {state.lower()}, loss {found[0]:.4f} to {found[-1]:.4f}"


def own_loop(copy: Path, block: str) -> str:
    stock, custom = (
        [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", shell(loop, copy), re.M)]
        for loop in (STOCK_LOOP, block)
    )
    apart = max((abs(a - b) for a, b in zip(stock, custom, strict=False)), default=float("inf"))
    require(
        len(stock) == len(custom) == 10 and apart <= LOSS_THRESHOLD,
        f"{len(stock)} and {len(custom)} steps, losses differ by {apart:.1e}",
    )
    return f"losses of both loops differ by {apart:.1e}"


def plan(copy: Path, block: str) -> str:
    folder = with_own_run(copy, "planned")
    written = re.findall(r"wrote the layout (.+) into", shell(block, folder))
    found = losses(folder / "run")
    require(len(written) == 1 and found[-1] < found[0] - 0.5, f"{written}, {found[0]} to {found[-1]}")
    return f"{written[0]}, loss {found[0]:.4f} to {found[-1]:.4f}"


RUN: dict[str, Callable[[Path, str], str]] = {
    "quick start": quick_start,
    "fine-tune": fine_tune,
    "cluster": cluster,
    "own loop": own_loop,
    "plan": plan,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--here", action="store_true", help="use the environment that runs this")
    parser.add_argument("--only", nargs="+", choices=list(PATHS), default=list(PATHS))
    options = parser.parse_args(arguments)
    chosen = dict.fromkeys(["quick start", *options.only])  # the others use what it makes
    held = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "fourfold"
        # What is committed: a checkout may hold what an earlier quick start made.
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        readme = (copy / "README.md").read_text()
        if options.here:
            (copy / ENVIRONMENT).symlink_to(sys.prefix)
        else:
            start_s = time.perf_counter()
            shell(split_installation(commands(readme))[0], copy)
            print(f"{'installation':14} {(time.perf_counter() - start_s) / 60:5.1f} min", flush=True)
        for path in chosen:
            start_s = time.perf_counter()
            try:
                said = RUN[path](copy, commands(readme, PATHS[path]))
            except Failed as failure:
                said = f"FAILED: {failure}"
            took_s = time.perf_counter() - start_s
            if path == "quick start" and took_s > QUICK_START_S:
                said = f"FAILED: {took_s:.0f} s of {QUICK_START_S:.0f} s allowed; {said}"
            held += not said.startswith("FAILED")
            print(f"{path:14} {took_s / 60:5.1f} min ({took_s:.0f} s)   {said}", flush=True)
    print(f"first hour: {held}/{len(chosen)} paths of the README work word by word")
    return 0 if held == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
