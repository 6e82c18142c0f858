"""Exit codes of commands: the agent restarts ranks after an error of the machine, not after an error of the user."""

import errno
from importlib.metadata import version

import pytest

from fourfold.checkpoint.save import SaveError
from fourfold.cli.main import exit_code_of, main
from fourfold.processes import REFUSED
from fourfold.train.recovery.rollback import RollbackFailed
from tests.documented import site


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


def test_every_command_and_option_has_a_help_text() -> None:
    reference = site("reference")
    for name, parser in reference.leaves(reference.parser_of_fourfold(), "fourfold"):
        assert parser.description, name
        missing = [action.option_strings or action.dest for action in parser._actions if not action.help]
        assert not missing, f"{name}: {missing}"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fourfold {version('fourfold')}\n"
