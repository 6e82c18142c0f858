"""Jobs on a real Slurm of two nodes: they start, are warned, saved, requeued and cancelled as the script promises."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import local_slurm as slurm
from benchmarks.local_slurm import state, wait_until
from benchmarks.run_toml import to_toml
from fourfold.cli.main import main
from fourfold.launch.slurm import SlurmJob, render, submit
from fourfold.launch.world import World
from tests import slurm_rank
from tests.training import write_run

RUN = """\
[model]
config = "tiny/config.json"
[data]
sources = [{ path = "text" }]
sequence_length = 128
[batch]
tokens = 1024
[grid]
data = 2
z = 4
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    reason = slurm.why_not()
    if reason:
        pytest.skip(reason)
    with slurm.slurm(tmp_path_factory.mktemp("slurm")):
        yield


def job_of(folder: Path, command: Sequence[str], nodes: int = 2) -> SlurmJob:
    return SlurmJob(
        World(nodes, ranks_per_node=1, gpus_per_node=0),
        command,
        name="a run",
        folder=folder,
        logs=folder / "logs",
        python=sys.executable,
        options={"time": "10", "partition": "main"},
        grace_period_s=60,
    )


def submit_job(job: SlurmJob) -> str:
    script = job.folder / "run.sbatch"
    script.write_text(render(job))
    return submit(script, job.logs)


def said(folder: Path) -> str:
    """The logs of a job, for the message of a failed test."""
    return "\n".join(f"== {p}\n{p.read_text()}" for p in sorted(folder.rglob("logs/**/*")) if p.is_file())


def reach(job: str, wanted: str, folder: Path, limit_s: float = 90) -> None:
    wait_until(lambda: state(job) in (wanted, *ENDED), f"{wanted} job", limit_s)
    assert state(job) == wanted, said(folder)


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_warned_run_saves_is_requeued_and_resumes(tmp_path, capsys):
    """`fourfold launch slurm` on a real Slurm, with a rank on each of two nodes, warned during training."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    values = write_run(folder)
    values["schedule"]["steps"] = 100_000
    values["grid"] = {"x": 2}
    file, metrics = folder / "run.toml", folder / "logs/metrics.jsonl"
    file.write_text(to_toml(values))
    options = [
        "--nodes",
        "2",
        "--ranks-per-node",
        "1",
        "--time",
        "10",
        "--partition",
        "main",
        "--grace-period",
        "60",
    ]
    assert main(["launch", "slurm", str(file), *options, "--folder", str(folder)]) == 0
    (job,) = re.findall(r"job (\d+)", capsys.readouterr().out)
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "three steps", 90)
    # As Slurm does $grace_period_s before the time limit.
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    reach(job, "PENDING", folder)
    saved = max(int(path.name.split("-")[1]) for path in (folder / "checkpoints").iterdir())
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == saved
    values["schedule"]["steps"] = saved + 2
    file.write_text(to_toml(values))
    # Slurm delays a requeued job for two minutes. A few seconds are enough, but needed: within the same second, a node
    # would take the job for the killed one.
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"], check=True)
    reach(job, "COMPLETED", folder)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(
        range(1, saved + 3)
    )
    log = (folder / f"logs/slurm-{job}.out").read_text()
    assert "start 0 ended with exit code 85" in log
    assert "start 1 ended with exit code 0" in log
    ranks = list(folder.glob(f"logs/{job}/node-*/*/attempt_0/0/stderr.log"))
    assert len(ranks) == 4, said(folder)


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_cancelled_job_saves_and_is_not_requeued(tmp_path):
    job = submit_job(job_of(tmp_path, [slurm_rank.__file__, str(tmp_path)], nodes=1))
    wait_until((tmp_path / "listening").exists, "rank", 90)
    subprocess.run(["scancel", job], check=True)
    wait_until((tmp_path / "saved.json").exists, "checkpoint", 20)
    wait_until(lambda: not slurm.ask("squeue", "-h"), "empty queue", 30)
    assert state(job) == "CANCELLED"


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_run_that_fails_fails_its_job(tmp_path):
    job = submit_job(job_of(tmp_path, ["--no-python", "false"], nodes=1))
    reach(job, "FAILED", tmp_path)
    assert "start 0 ended with exit code 1" in (tmp_path / f"logs/slurm-{job}.out").read_text()


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_job_whose_ranks_do_not_end_is_requeued(tmp_path):
    job = replace(job_of(tmp_path, ["--no-python", "sleep", "100"], nodes=1), grace_period_s=10)
    number = submit_job(job)
    wait_until(lambda: list(tmp_path.glob(f"logs/{number}/node-0/*")), "agent", 90)
    subprocess.run(["scancel", "--signal=USR1", "--batch", number], check=True)
    reach(number, "PENDING", tmp_path, 30)
    assert "did not end in time" in (tmp_path / f"logs/slurm-{number}.out").read_text()
    subprocess.run(["scancel", number], check=True)


# -- the script, without a Slurm ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    file = tmp_path / "night run.toml"
    file.write_text(RUN)
    return file


def test_the_script_has_every_setting(run, capsys):
    options = ["--partition", "gpu", "--account", "abc", "--time", "2:00:00", "--sbatch", "qos=high"]
    options += ["--sbatch", "exclusive", "--constraint", "a100&nvlink", "--set", "optimizer.lr=1e-4"]
    options += ["--setup", "module load cuda", "--grace-period", "300", "--max-requeues", "7", "--print"]
    assert main(["launch", "slurm", str(run), "--nodes", "4", *options]) == 0
    script = capsys.readouterr().out
    head = script.splitlines()
    for line in ("nodes=4", "gpus-per-node=2", "partition=gpu", "account=abc", "time=2:00:00", "qos=high"):
        assert f"#SBATCH --{line}" in head
    for line in ("exclusive", "requeue", "constraint=a100&nvlink", "signal=B:USR1@300", "open-mode=append"):
        assert f"#SBATCH --{line}" in head
    assert f"command=(-m fourfold train '{run}' --set=optimizer.lr=1e-4)" in head
    assert {"module load cuda", "export max_requeues=7", "export ranks_per_node=2"} <= set(head)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not run.with_suffix(".sbatch").exists()


def test_a_dry_run_writes_and_submits_nothing(run, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    launch = ["launch", "slurm", str(run), "--nodes", "2", "--folder", str(run.parent)]
    assert main([*launch, "--dry-run"]) == 0
    assert run.with_suffix(".sbatch").read_text().startswith("#!/bin/bash\n")
    assert (run.parent / "logs").is_dir()
    assert main(launch) == 2
    assert "no sbatch here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "4", "--gpus-per-node", "4"], ["8 ranks", "16", "--nodes 2", "grid.z="]),
        (["--nodes", "3"], ["8 ranks", "3 nodes", "1, 2, 4, 8"]),
        (["--nodes", "4", "--set", "grid=auto"], ["sets no grid", "--gpus-per-node"]),
        (["--nodes", "2", "--gpus-per-node", "2", "--ranks-per-node", "4"], ["4 ranks", "has 2"]),
        (["--nodes", "4", "--set", "checkpoints.resume=false"], ["checkpoints.resume"]),
        (["--nodes", "4", "--set", "grid.dat=2"], ["'data'"]),
        (["--nodes", "4", "--time", "3:30"], ["210 s", "120 s", "4 minutes"]),
        (["--nodes", "4", "--sbatch", "signal=USR2@60"], ["--grace-period"]),
        (["--nodes", "4", "--sbatch", "-p gpu"], ["not an option of sbatch"]),
        (["--nodes", "4", "--sbatch", "comment=two words"], ["space"]),
        (["--nodes", "4", "--partition", "gpu\nrm -rf x"], ["space"]),
    ],
)
def test_an_invalid_job_is_rejected_before_it_is_submitted(run, capsys, options, words):
    assert main(["launch", "slurm", str(run), *options, "--print"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert [word for word in words if word not in said.err] == [], said.err


def test_a_grid_that_is_not_set_uses_the_ranks_of_the_job(run, capsys):
    launch = ["launch", "slurm", str(run), "--set", "grid=auto", "--print"]
    assert main([*launch, "--nodes", "2", "--ranks-per-node", "4"]) == 0
    said = capsys.readouterr()
    assert "export ranks_per_node=4" in said.out
    assert "gpus-per-node" not in said.out.partition("\n\n")[0]
    assert "8 ranks get data=1 z=8 y=1 x=1 (all ranks on z)" in said.err
    assert main([*launch, "--nodes", "5", "--ranks-per-node", "3"]) == 2
    assert "do not divide over 15 ranks" in capsys.readouterr().err


def test_relative_paths_start_at_the_folder_of_the_job(tmp_path, capsys, monkeypatch):
    folder, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    values = write_run(folder)
    values["model"]["pretrained"] = "model"
    values["data"]["sources"] = [{"path": "data"}]
    values["grid"] = {"z": 2}
    (folder / "run.toml").write_text(to_toml(values))
    monkeypatch.chdir(elsewhere)
    launch = ["launch", "slurm", "../job/run.toml", "--nodes", "1", "--ranks-per-node", "2", "--print"]
    assert main([*launch, "--folder", str(folder)]) == 0
    assert "on this machine" not in capsys.readouterr().err
    assert main(launch) == 0
    assert "data is not a prepared data set on this machine" in capsys.readouterr().err
