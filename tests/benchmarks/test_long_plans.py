"""The table of long sequences on the page of the planner's accuracy is what the command prints."""

from pathlib import Path

import pytest

from benchmarks.long_plans import CASES, Case, row

PAGE = Path(__file__).parents[2] / "docs/verification/planner-accuracy.md"


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.gpus} {case.length}")
def test_the_page_has_what_is_predicted(case: Case) -> None:
    assert f"| {' | '.join(row(case))} |" in PAGE.read_text()
