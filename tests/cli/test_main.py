"""What a command ends with: the agent starts ranks again after a failure of the machine, and not after a refusal."""

import errno

import pytest

from fourfold.checkpoint.save import SaveError
from fourfold.cli.main import exit_code_of
from fourfold.processes import REFUSED
from fourfold.train.recovery.rollback import RollbackFailed


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x=3 does not divide 8"), REFUSED),
        (FileNotFoundError(errno.ENOENT, "there is none", "run.toml"), REFUSED),
        (RollbackFailed("gone back to twice"), REFUSED),
        (SaveError("step-4 was not saved"), 1),
        (OSError(errno.EIO, "a disk that fails"), 1),
        (OSError(errno.ENOSPC, "a disk that is full"), 1),
    ],
)
def test_who_has_to_mend_it(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise error

    assert exit_code_of(fails) == status
    assert f"fourfold: {error}" in capsys.readouterr().err


def test_a_defect_keeps_its_trace() -> None:
    def fails() -> int:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        exit_code_of(fails)
