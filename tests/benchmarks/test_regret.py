"""Regret: the bars can fail, and a small version runs from calibration to verdict."""

import json
import re

import pytest

from benchmarks import cluster, regret
from benchmarks.measure import Times
from benchmarks.regret import Row, bars_of, spearman
from fourfold.planner.simulate import Simulated

needs_network = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
MEASURED = [1.0, 1.2, 1.5, 1.9, 2.4, 3.0, 4.0, 5.0, 6.0, 8.0]


def rows_of(predicted, measured=MEASURED):
    return [
        Row((1, 1, 1, i + 1), Simulated(p, 0.0, {}, {}, ()), Times((m, m, m)), {})
        for i, (p, m) in enumerate(zip(predicted, measured, strict=True))
    ]


def holds(predicted):
    return [bar.holds for bar in bars_of(rows_of(predicted))]


def test_a_perfect_plan_holds_every_bar():
    assert holds(MEASURED) == [True] * 4


def test_each_bar_can_be_missed_alone():
    # The second is chosen, 20 % slower than the fastest.
    assert holds([1.21, 1.2, *MEASURED[2:]]) == [False, True, True, True]
    # The fastest is number four, and the first choice is not the fastest either.
    assert holds([1.91, 1.2, 1.5, 1.9, *MEASURED[4:]]) == [False, False, True, True]
    # The slow ones in any order.
    assert holds([1.0, 1.2, 1.5, 1.9, 8.0, 6.0, 4.0, 5.0, 3.0, 2.4]) == [True, True, False, True]
    # All by a fifth too long: the choice is right, the times are not.
    assert holds([1.2 * m for m in MEASURED]) == [True, True, True, False]


def test_a_choice_within_three_percent_is_good_enough():
    measured = [1.0, 1.02, *MEASURED[2:]]
    bars = bars_of(rows_of([1.03, 1.02, *MEASURED[2:]], measured))
    assert [bar.holds for bar in bars] == [True] * 4
    assert bars[0].figure == "2.0%"


def test_spearman_of_equal_values_shares_their_ranks():
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 1, 2, 3], [1, 1, 2, 3]) == 1


@pytest.mark.nightly
@needs_network
def test_a_small_version_runs_through(tmp_path, capsys):
    grids = ["4,1,1,1", "1,1,1,4"]
    arguments = [
        "--models",
        "tiny",
        "--mbit",
        "1000",
        "--steps",
        "2",
        "--minutes",
        "0.2",
        "--hosts",
        "2",
        "--keep",
        str(tmp_path),
    ]
    code = regret.main([*arguments, "--plot", str(tmp_path / "plot.png"), "--grids", *grids])
    printed = capsys.readouterr().out
    verdict = re.search(r"regret: (\d)/4 bars hold$", printed.strip())
    assert verdict is not None, printed
    assert code == (0 if verdict[1] == "4" else 1)
    found = json.loads((tmp_path / "steps-tiny.json").read_text())
    assert set(found) == {"(4, 1, 1, 1)", "(1, 1, 1, 4)"}
    assert all(len(of["1000.0"]["seconds"]) == 2 for of in found.values())
    assert (tmp_path / "plot.png").stat().st_size > 1000
    # What was measured is taken from the folder, and a plan that is wrong is found out.
    for shape, factor in (("(4, 1, 1, 1)", 1.0), ("(1, 1, 1, 4)", 100.0)):
        found[shape]["1000.0"]["seconds"] = [factor, factor]
    (tmp_path / "steps-tiny.json").write_text(json.dumps(found))
    assert regret.main([*arguments, "--grids", *grids]) == 1
