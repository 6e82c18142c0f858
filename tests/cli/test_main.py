"""Exit codes of commands: the agent restarts ranks after an error of the machine, not after an error of the user."""

import errno

import pytest

from fourfold.checkpoint.save import SaveError
from fourfold.cli.main import exit_code_of
from fourfold.processes import REFUSED
from fourfold.train.recovery.rollback import RollbackFailed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x=3 does not divide 8"), REFUSED),
        (FileNotFoundError(errno.ENOENT, "no such file", "run.toml"), REFUSED),
        (RollbackFailed("rolled back twice"), REFUSED),
        (SaveError("step-4 was not saved"), 1),
        (OSError(errno.EIO, "disk error"), 1),
        (OSError(errno.ENOSPC, "disk full"), 1),
    ],
)
def test_exit_codes_tell_user_errors_from_machine_errors(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise error

    assert exit_code_of(fails) == code
    assert f"fourfold: {error}" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback() -> None:
    def fails() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        exit_code_of(fails)
