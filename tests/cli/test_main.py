"""Exit codes of commands: the agent restarts ranks after an error of the machine, not after an error of the user."""

import errno
import resource
import subprocess
import sys
from importlib.metadata import version

import pytest

from fourfold.checkpoint.save import SaveError
from fourfold.cli.main import exit_code_of, main
from fourfold.processes import REFUSED
from fourfold.train.recovery.rollback import RollbackFailed
from tests.documented import check, site


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


def test_every_command_has_an_example_that_it_accepts() -> None:
    reference = site("reference")
    for name, parser in reference.leaves(reference.parser_of_fourfold(), "fourfold"):
        words, _, example = str(parser.epilog).partition(": ")
        assert words == "Example", name
        assert name in example.replace("torchrun --nproc-per-node 8 -m ", ""), example
        check(example)
        # A line of a terminal: argparse would break a longer one in two.
        assert len(parser.epilog) < 110, name


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_can_complete_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", shell])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("doctor", "plan", "--simulate"))


def test_the_doctor_says_what_a_run_would_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "hsn0")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2048))
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in (
        f"fourfold {version('fourfold')}",
        "torch 2.13",
        "NCCL_SOCKET_IFNAME=hsn0",
        "collectives by Gloo",
    ):
        assert words in said
    assert "fix: a process may open 2048 files" in said
    assert "ulimit -Hn" in said


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fourfold {version('fourfold')}\n"


def test_a_reader_that_ends_early_is_not_an_error():
    command = [
        sys.executable,
        "-m",
        "fourfold",
        "plan",
        "--size",
        "1b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
