"""Small versions of the benchmarks of training: what they promise holds, and a planted fault makes them fail."""

import re

import pytest

from benchmarks import fine_tuning, first_hour, learn, throughput

pytestmark = pytest.mark.nightly

SMALL = ["--hidden", "64", "--layers", "1", "--length", "64", "--vocabulary", "400", "--megabytes", "1"]


def test_a_small_run_learns_the_same_on_a_grid_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert learn.main([*SMALL, "--steps", "240", "--grids", "1,1,2,1"]) == 0
    assert "the exported model generates: 'def __init__(self" in capsys.readouterr().out


def test_curves_that_part_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    same = {1: 5.0, 2: 4.0}
    assert learn.report({"one": same, "other": {1: 5.04, 2: 4.0}}, {})
    assert not learn.report({"one": same, "other": {1: 5.06, 2: 4.0}}, {})
    assert not learn.report({"one": same, "other": {1: 5.0, 2: 4.0, 3: 3.0}}, {})
    assert "largest difference: 1.20e-02 at step 1" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [None, "mask"])
def test_a_small_model_learns_the_answers_of_chats(
    fault: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", "full", "--grids", "1,1,1,2"]
    code = fine_tuning.main([*words, "--break", fault] if fault else words)
    said = capsys.readouterr().out
    assert code == (1 if fault else 0)
    answers = re.findall(r"([0-9.]+)% \(", said)
    assert min(map(float, answers)) >= 90 if fault is None else max(map(float, answers)) < 5, said


def test_the_quick_start_word_by_word(capsys: pytest.CaptureFixture[str]) -> None:
    """In the environment of the tests; `python -m benchmarks.first_hour` makes one of its own."""
    assert first_hour.main(["--here", "--only", "quick start", "fine-tune"]) == 0
    said = capsys.readouterr().out
    assert "README.md" in said  # the model card
    assert "tokenizer.json" in said


def test_throughput_is_measured_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Too small and too short for its bars; all of it is there."""
    small = ["--hidden", "64", "--layers", "1", "--length", "32", "--sequences", "2", "--steps", "41"]
    code = throughput.main(small)
    said = capsys.readouterr().out
    (rate,), (cost,) = (
        re.findall(rf"([0-9.]+) \(threshold {bar}\)", said) for bar in (throughput.RATE, throughput.SAVING)
    )
    assert code == int(float(rate) < throughput.RATE or float(cost) > throughput.SAVING)
    assert "40 steps each, alternating" in said
    assert "2 saves" in said
