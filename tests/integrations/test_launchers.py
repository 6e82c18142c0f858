"""A script with the mixin has the same losses however it is started: by torchrun, by accelerate, by Slurm."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks import local_slurm
from benchmarks.local_slurm import ENDED, state, wait_until
from fourfold.launch.slurm import SlurmJob, render, submit
from fourfold.launch.world import World
from tests.integrations import launched

ROOT = Path(__file__).parents[2]
GRID = "1,1,1,2"
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"}
BIN = Path(sys.executable).parent


def run(command: Sequence[str], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        [*command, launched.__file__, str(folder), GRID],
        env=os.environ | SETTINGS | settings,
        capture_output=True,
        text=True,
        timeout=500,
    )


def losses(folder: Path) -> list[float]:
    """Those that both ranks logged; the first one writes for both."""
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first["losses"] == second["losses"]
    assert (first["is_first"], second["is_first"]) == ([True, True], [False, False])
    return first["losses"]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("torchrun") / "run"
    done = run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"], folder)
    assert done.returncode == 0, done.stderr
    assert len(losses(folder)) == 4
    return losses(folder)


# `--multi_gpu` is how accelerate starts several processes; without a GPU they take the CPU.
ACCELERATE = (str(BIN / "accelerate"), "launch", "--num_processes", "2", "--num_machines", "1")
PLAIN = ("--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")


@pytest.mark.nightly
def test_a_plain_accelerate_launch(by_torchrun: list[float], tmp_path: Path) -> None:
    done = run([*ACCELERATE, *PLAIN], tmp_path / "run", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == by_torchrun


@pytest.mark.nightly
def test_an_accelerate_launch_that_places_the_model_is_refused(tmp_path: Path) -> None:
    options = ["--use_fsdp", "--fsdp_version", "2", *PLAIN[1:]]
    done = run([*ACCELERATE, *options], tmp_path / "run", HF_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "ACCELERATE_USE_FSDP=true" in done.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if reason := local_slurm.why_not():
        pytest.skip(reason)
    with local_slurm.slurm(tmp_path_factory.mktemp("slurm")):
        yield


def ends(job: str, folder: Path) -> None:
    wait_until(lambda: state(job) in ENDED, "end of the job", 400)
    assert state(job) == "COMPLETED", "\n".join(
        p.read_text() for p in folder.rglob("logs/**/*") if p.is_file()
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_job_of_slurm(by_torchrun: list[float], tmp_path: Path) -> None:
    """As `fourfold launch slurm` starts ranks: torchrun on each of two nodes."""
    job = SlurmJob(
        World(2, ranks_per_node=1, gpus_per_node=0),
        [launched.__file__, str(tmp_path), GRID],
        name="a trainer",
        folder=tmp_path,
        logs=tmp_path / "logs",
        python=sys.executable,
        options={"time": "10", "partition": "main"},
        setup=[f"export {name}={value}" for name, value in SETTINGS.items()],
    )
    script = tmp_path / "run.sbatch"
    script.write_text(render(job))
    ends(submit(script, job.logs), tmp_path)
    assert losses(tmp_path) == by_torchrun


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_srun_without_torchrun(by_torchrun: list[float], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--partition=main", "--time=10"]
    done = subprocess.run(
        [*srun, sys.executable, launched.__file__, str(tmp_path / "run"), GRID],
        # The names of these nodes, n0 and n1, are known to Slurm alone.
        env=os.environ | SETTINGS | {"MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == by_torchrun
