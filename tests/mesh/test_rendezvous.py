"""Errors of a wrong start: invalid sizes, no process group to join, incomplete Slurm variables."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fourfold.mesh.grid import Grid
from fourfold.mesh.rendezvous import first_host


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((1, 0, 1, 2), r"axis z of grid \(1, 0, 1, 2\) has size 0; use a whole number of at least 1"),
        ((1, 1, 1, -2), r"axis x of grid \(1, 1, 1, -2\) has size -2; use a whole number of at least 1"),
        ((1, 1, 2.0, 1), r"axis y of grid \(1, 1, 2\.0, 1\) has size 2\.0; use a whole number"),
        (("2", 1, 1, 1), r"axis data of grid \('2', 1, 1, 1\) has size '2'; use a whole number"),
        ((2, 2, 2), r"4 axes \(data, z, y, x\), got 3 sizes: \(2, 2, 2\); use 1 for an axis"),
    ],
)
def test_invalid_sizes(shape: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Grid.create(shape)


WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM_VARIABLES = ("PROCID", "NTASKS", "LOCALID", "STEP_NODELIST", "JOB_NODELIST", "JOB_ID")


@pytest.fixture
def no_world(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*WORLD_VARIABLES, *(f"SLURM_{name}" for name in SLURM_VARIABLES)):
        # Set first, so that monkeypatch also undoes what the code under test sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_no_process_group_to_join(no_world: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"RANK \(torchrun\) nor SLURM_PROCID \(srun\).*start with `torchrun.*`srun"
    ):
        Grid.create((1, 1, 1, 2), device_type="cpu")


@pytest.mark.parametrize("missing", ["NTASKS", "LOCALID", "JOB_ID", "JOB_NODELIST"])
def test_incomplete_slurm_variables(missing: str, no_world: pytest.MonkeyPatch) -> None:
    values = {"PROCID": "3", "NTASKS": "8", "LOCALID": "3", "JOB_NODELIST": "n[1-2]", "JOB_ID": "17"}
    for name, value in values.items():
        if name != missing:
            no_world.setenv(f"SLURM_{name}", value)
    with pytest.raises(
        ValueError, match=rf"SLURM_PROCID=3 is set, but .*SLURM_{missing} is not; start with `srun"
    ):
        Grid.create((1, 1, 1, 8), device_type="cpu")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("login1,nid[001024-001027]", "login1"),
        ("nid[001024-001027,001100],login1", "nid001024"),
        ("gpu[3,5-6]", "gpu3"),
        ("rack[2-3]-n[08-11]", "rack2-n08"),
        ("n[1-2].cluster.example,m1", "n1.cluster.example"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "nid[001024-001027", ",n1", "n]1["])
def test_first_host_of_an_invalid_list(nodelist: str) -> None:
    with pytest.raises(ValueError, match=rf"node list {re.escape(repr(nodelist))}; set MASTER_ADDR"):
        first_host(nodelist)
