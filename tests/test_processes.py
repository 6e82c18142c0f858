"""How a process of a run was started."""

import pytest

from fourfold.processes import is_rank


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"RANK": "0"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, False),  # an sbatch script
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, False),  # srun --pty bash
    ],
)
def test_a_rank_is_known_by_its_launcher(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank() == expected
