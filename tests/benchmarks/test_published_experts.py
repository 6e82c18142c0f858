"""The comparison with published steps of mixtures of experts: its split, and the table on the page."""

import pytest

from benchmarks import published_experts
from benchmarks.published_experts import ROWS
from tests.documented import ROOT


def test_about_half_of_the_rows_are_held_out() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS) == 9
    assert sum(row.is_fitted for row in ROWS) == 4
    # Another measurement of a held-out row does not change what is fitted.
    assert {row.kind for row in ROWS if not row.is_fitted} == {"FSDP", "FSDP+EP", "EP"}


def test_the_crossing_is_where_both_send_the_same_bytes() -> None:
    for workload in (published_experts.QWEN3_30B, published_experts.DEEPSEEK_V3):
        for micro_batches in (1, 8):
            tokens = published_experts.crossing_tokens(workload, micro_batches)
            sent = [
                published_experts.bytes_on_z(workload, tokens, micro_batches, owned=owned)
                for owned in (True, False)
            ]
            assert sent[0] == pytest.approx(sent[1])


@pytest.mark.nightly
def test_the_page_has_the_table_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert published_experts.main(["--markdown"]) == 0
    page = (ROOT / "docs/verification/planner-accuracy.md").read_text()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line for line in table if line not in page] == []
