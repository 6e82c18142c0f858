"""Trainers on a grid are exact with the releases of transformers and TRL before the newest, too, which other nightly tests have."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def releases(package: str) -> list[str]:
    """The last release of each minor version, newest first, by the package index."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    (line,) = re.findall(r"Available versions: (.*)", said.stdout)
    newest: dict[str, str] = {}
    for version in line.split(", "):
        newest.setdefault(version.rpartition(".")[0], version)
    return list(newest.values())


def environment(folder: Path, requirements: list[str]) -> Path:
    """The packages of this environment, but for some and what those need; the path of its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    at = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run([python, *at], capture_output=True, text=True, check=True).stdout.strip()
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *requirements, "torch==2.13.0"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.nightly
@pytest.mark.parametrize(("package", "back"), [("transformers", 1), ("transformers", 2), ("trl", 1)])
def test_trainers_are_exact_with_an_earlier_release(package: str, back: int, tmp_path: Path) -> None:
    for needed in ("trl", "peft", "accelerate"):
        pytest.importorskip(needed)
    release = releases(package)[back]
    requirements, settings = [f"{package}=={release}"], {"PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"}
    if (package, release.rpartition(".")[0]) == ("trl", "1.15"):  # whose stock trainers are for GPUs alone
        requirements.append("triton")
        settings["TRITON_INTERPRET"] = "1"
    python = environment(tmp_path / "venv", requirements)
    names = [] if package == "trl" else ["Trainer"]
    check = [python, "-m", "benchmarks.trainers", "--grids", "1,1,2,2", "--only", *names]
    done = subprocess.run(
        [*check, "SFTTrainer", "DPOTrainer"],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, f"{package} {release}\n{done.stdout}{done.stderr}"
