"""Arguments of several commands: values that cannot be right are rejected before anything is read."""

import pytest

from fourfold.cli.main import main


@pytest.mark.parametrize("count", ["0", "-2", "1.5", "many"])
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "config.json", "--cluster", "dgx-h100", "--rows"],
        ["dryrun", "config.json", "--grid", "1,1,1,1", "--seq-len"],
        ["launch", "slurm", "run.toml", "--nodes"],
    ],
    ids=lambda words: words[0],
)
def test_a_count_below_1_is_rejected(words, count, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words[:-1], f"{words[-1]}={count}"])
    assert stopped.value.code == 2
    assert (
        f"argument {words[-1]}: {count} is not allowed; use a whole number of at least 1"
        in capsys.readouterr().err
    )
