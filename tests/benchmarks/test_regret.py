"""Regret: the thresholds can be missed, and a small version runs to its verdict."""

import re

import pytest

from benchmarks import cluster, regret
from benchmarks.regret import Row, spearman, thresholds_of
from benchmarks.slow_motion import steps
from benchmarks.slow_motion.conductor import Played
from fourfold.config.describe import sized_model_config
from fourfold.planner.simulate import Simulated

needs_network = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
MEASURED = [1.0, 1.2, 1.5, 1.9, 2.4, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0]


def rows_of(predicted, measured=MEASURED):
    return [
        Row((1, 1, 1, i + 1), Simulated(p, 0.0, {}, {}, ()), Played((m, m, m), 0.0))
        for i, (p, m) in enumerate(zip(predicted, measured, strict=True))
    ]


def holds(predicted):
    return [t.holds for t in thresholds_of(rows_of(predicted))]


def test_a_perfect_plan_holds_every_threshold():
    assert holds(MEASURED) == [True] * 4


def test_each_threshold_can_be_missed_alone():
    # The second is chosen, 20 % slower than the fastest.
    assert holds([1.21, 1.2, *MEASURED[2:]]) == [False, True, True, True]
    # The fastest is number four, and the first choice is not the fastest either.
    assert holds([1.91, 1.2, 1.5, 1.9, *MEASURED[4:]]) == [False, False, True, True]
    # The slow ones in the wrong order.
    assert holds([*MEASURED[:8], *reversed(MEASURED[8:])]) == [True, True, False, True]
    # All by a fifth too long: the choice is right, the times are not.
    assert holds([1.2 * m for m in MEASURED]) == [True, True, True, False]


def test_a_choice_within_three_percent_is_good_enough():
    measured = [1.0, 1.02, *MEASURED[2:]]
    found = thresholds_of(rows_of([1.03, 1.02, *MEASURED[2:]], measured))
    assert [t.holds for t in found] == [True] * 4
    assert found[0].figure == "2.0%"


def test_spearman_of_equal_values_shares_their_ranks():
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 1, 2, 3], [1, 1, 2, 3]) == 1


@pytest.mark.nightly
@needs_network
def test_a_small_version_runs_through(tmp_path, capsys, monkeypatch):
    small = sized_model_config("1m", 512) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    for name, value in {
        "MODELS": {"small": steps.Job(small, sequences=4, length=64)},
        "NODES": 2,
        "STEP_S": 0.2,
    }.items():
        monkeypatch.setattr(regret, name, value)
    figure = tmp_path / "regret.png"
    arguments = ["--models", "small", "--clusters", "dgx-h100", "--rounds", "1", "--figure", str(figure)]
    code = regret.main([*arguments, "--grids", "4,1,1,1", "1,1,1,4", "1,2,2,1"])
    said = capsys.readouterr().out
    (held,) = re.findall(r"regret: (\d)/4 thresholds hold", said)
    assert code == (0 if held == "4" else 1), said
    assert figure.stat().st_size > 10_000
